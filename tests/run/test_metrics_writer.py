"""metrics.jsonl and the TensorBoard files of a run: complete, and without repeated steps after any number of resumes.

Fixtures: `step_record(...)` and `eval_record(...)` return example records with some fields replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_records import STEP
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from electra_dist.run.folder import METRICS_FILE, TENSORBOARD_DIR
from electra_dist.run.metrics import (
    EvalRecord,
    MetricsWriter,
    Samples,
    StepRecord,
    TextSample,
    newest_samples,
    read_metrics,
)


def test_records_are_read_back_with_all_fields_and_their_kind(
    tmp_path: Path, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    writer = MetricsWriter(tmp_path)
    train = step_record(mfu=None, replaced_accuracy=float("inf"))
    evaluation = eval_record()

    writer.write(train)
    writer.write(evaluation)
    writer.sync()
    writer.close()

    records = read_metrics(tmp_path)
    assert [record.fields() for record in records] == [
        train.fields(),
        evaluation.fields(),
    ]
    assert not (tmp_path / TENSORBOARD_DIR).exists()


def record_of_step(step: int) -> StepRecord:
    """Return the record of a step, whose loss is a number with many digits that depends on the step."""
    loss = 10.0 / 3.0 ** (step / 7)
    return STEP.model_copy(update={"step": step, "mlm_loss": loss})


def write_attempt(folder: Path, start: int, last: int, every: int) -> None:
    """Write the records of one start of a run, which resumes at step `start` and is killed after step `last`.

    A record is written every `every` steps.
    """
    steps_recorded = [record.step for record in read_metrics(folder)]
    last_recorded_step = max(steps_recorded, default=0)
    writer = MetricsWriter(folder)
    assert writer.truncate_after(start) == max(start, last_recorded_step)
    for step in range(start + 1, last + 1):
        if step % every == 0:
            writer.write(record_of_step(step))
    writer.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), every=st.integers(1, 4), save_every=st.integers(1, 7))
def test_metrics_of_a_run_killed_at_any_steps_equal_those_of_an_unkilled_run_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, every: int, save_every: int
):
    """Each kill may leave a torn line of up to 15 bytes. The next start resumes at the newest checkpoint."""
    total_steps = 24
    unkilled = tmp_path_factory.mktemp("uncut")
    write_attempt(unkilled, 0, total_steps, every)

    killed = tmp_path_factory.mktemp("cut")
    checkpoint_step = 0
    last_steps = data.draw(st.lists(st.integers(0, total_steps), max_size=4))
    for last_step in last_steps:
        write_attempt(killed, checkpoint_step, last_step, every)
        num_torn_bytes = 3 * data.draw(st.integers(0, 5))
        with open(killed / METRICS_FILE, "ab") as file:
            file.write(b'{"kind": "train"'[:num_torn_bytes])
        newest_save = last_step // save_every * save_every
        checkpoint_step = max(checkpoint_step, newest_save)
    write_attempt(killed, checkpoint_step, total_steps, every)

    assert (killed / METRICS_FILE).read_bytes() == (unkilled / METRICS_FILE).read_bytes()


def test_every_line_of_the_metrics_file_is_a_json_object_with_its_step(
    tmp_path: Path, step_record: Callable[..., StepRecord]
):
    writer = MetricsWriter(tmp_path)
    writer.write(step_record(step=1))
    writer.write(step_record(step=2))
    writer.close()

    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_tensorboard_shows_each_step_once_with_the_values_of_the_newest_start_and_no_undefined_value(
    tmp_path: Path, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    """The first start makes steps 1 to 6; the second resumes at 4 with another learning rate, and repeats 5 and 6."""

    def write_start(first_step: int, last_step: int, lr: float) -> None:
        writer = MetricsWriter(tmp_path, tensorboard={})
        if first_step > 1:
            last_recorded_step = writer.truncate_after(first_step - 1)
            assert last_recorded_step == 6
        for step in range(first_step, last_step + 1):
            writer.write(step_record(step=step, lr=lr, mfu=None, grad_norm=float("nan")))
        writer.write(eval_record(step=last_step))
        writer.sync()
        writer.close()
        writer.close()  # a second close does nothing

    write_start(first_step=1, last_step=6, lr=1.0)
    write_start(first_step=5, last_step=8, lr=2.0)

    events = EventAccumulator(str(tmp_path / TENSORBOARD_DIR))
    events.Reload()
    lr_points = events.Scalars("optimizer/lr")
    assert [point.step for point in lr_points] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [point.value for point in lr_points] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert [point.step for point in events.Scalars("eval/auc")] == [8]
    tags = set(events.Tags()["scalars"])
    assert "loss/mlm" in tags
    heldout = EventAccumulator(str(tmp_path / TENSORBOARD_DIR / "heldout"))
    heldout.Reload()
    heldout_tags = set(heldout.Tags()["scalars"])
    assert heldout_tags == {"loss/mlm", "loss/rtd", "accuracy/mlm", "accuracy/rtd_replaced"}
    assert heldout_tags <= tags  # TensorBoard draws equal tags into one chart
    assert heldout.Scalars("loss/mlm")[0].value == pytest.approx(eval_record().mlm_loss)
    undefined_tags = {"speed/mfu", "optimizer/grad_norm"}  # None and NaN in every record
    assert tags.isdisjoint(undefined_tags)


def test_tensorboard_has_the_settings_as_hyperparameters_and_the_replaced_words_as_text(
    tmp_path: Path, step_record: Callable[..., StepRecord]
):
    settings = {"train.num_steps": 400, "objective.name": "rtd", "log.tensorboard": True}
    sample = TextSample(
        original=["a", "chef", "##s", "*"], shown=["a", "dog", "##s", "*"], replaced_probability=[0.1, 0.875, 0.2, 0.3]
    )
    writer = MetricsWriter(tmp_path, tensorboard=settings)

    writer.write(step_record(step=10))
    writer.write_samples(10, [sample])
    writer.close()

    events = EventAccumulator(str(tmp_path / TENSORBOARD_DIR))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["train.num_steps"].number_value == 400
    assert hparams["objective.name"].string_value == "rtd"
    heldout = EventAccumulator(str(tmp_path / TENSORBOARD_DIR / "heldout"))
    heldout.Reload()
    (event,) = heldout.Tensors("replaced words/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == r"a **dog**s \*"
    assert "| chef | dog | 0.88 |" in lines


def test_samples_of_steps_that_a_run_repeats_are_dropped(tmp_path: Path):
    sample = TextSample(original=["a"], shown=["b"], replaced_probability=[0.5])
    writer = MetricsWriter(tmp_path)
    assert newest_samples(tmp_path) is None
    for step in (10, 20, 30):
        writer.write_samples(step, [sample])
    writer.close()

    second_start = MetricsWriter(tmp_path)
    second_start.truncate_after(25)
    second_start.close()

    newest = newest_samples(tmp_path)
    assert newest == Samples(step=20, texts=[sample])
