"""metrics.jsonl over resumes; TensorBoard holds what it should."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.run.folder import METRICS_FILE, TENSORBOARD_DIR
from electra_dist.run.metrics_writer import MetricsWriter, read_metrics
from electra_dist.run.step_records import EvalRecord, StepRecord


def test_fields_and_kinds(
    tmp_path: Path, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    train, evaluation = step_record(mfu=None, replaced_accuracy=float("inf")), eval_record()
    writer.write(train)
    writer.write(evaluation)
    writer.sync()
    writer.close()
    assert read_metrics(tmp_path) == [
        {"kind": "train", **dataclasses.asdict(train)},
        {"kind": "eval", **dataclasses.asdict(evaluation)},
    ]
    assert read_metrics(tmp_path / METRICS_FILE) == read_metrics(tmp_path)
    assert not (tmp_path / TENSORBOARD_DIR).exists()


def _loss(step: int) -> float:
    return 10.0 / 3.0 ** (step / 7)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), every=st.integers(1, 4), save_every=st.integers(1, 7))
def test_a_run_cut_anywhere_any_number_of_times_has_the_file_of_an_uncut_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, every: int, save_every: int
):
    total = 24

    def attempt(folder: Path, start: int, last: int) -> None:
        writer = MetricsWriter(folder, tensorboard=False)
        furthest = max((record["step"] for record in read_metrics(folder)), default=0)
        assert writer.truncate_after(start) == max(start, furthest)
        for step in range(start + 1, last + 1):
            if step % every == 0:
                writer.write(dataclasses.replace(BASE, step=step, mlm_loss=_loss(step)))
        writer.close()

    uncut, cut = tmp_path_factory.mktemp("uncut"), tmp_path_factory.mktemp("cut")
    attempt(uncut, 0, total)
    checkpoint = 0
    for last in data.draw(st.lists(st.integers(0, total), max_size=4)):
        attempt(cut, checkpoint, last)
        torn = data.draw(st.integers(0, 5))
        with open(cut / METRICS_FILE, "ab") as file:
            file.write(b'{"kind": "train"'[: 3 * torn])
        checkpoint = max(checkpoint, last // save_every * save_every)
    attempt(cut, checkpoint, total)
    assert (cut / METRICS_FILE).read_bytes() == (uncut / METRICS_FILE).read_bytes()


BASE = StepRecord(
    **{field.name: 1 if field.name in ("step", "tokens_seen") else 0.5 for field in dataclasses.fields(StepRecord)}
)


def test_every_line_is_an_object_with_a_step(tmp_path: Path, step_record: Callable[..., StepRecord]):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in (1, 2):
        writer.write(step_record(step=step))
    writer.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == [1, 2]


def test_tensorboard_has_the_scalars_and_forgets_repeated_steps(
    tmp_path: Path, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, last, lr in ((0, 6, 1.0), (4, 8, 2.0)):
        writer = MetricsWriter(tmp_path, tensorboard=True)
        if start:
            assert writer.truncate_after(start) == 6  # what is lost: two steps
        for step in range(start + 1, last + 1):
            writer.write(step_record(step=step, lr=lr, mfu=None, grad_norm=float("nan")))
        writer.write(eval_record(step=last))
        writer.sync()
        writer.close()
        writer.close()
    events = EventAccumulator(str(tmp_path / TENSORBOARD_DIR))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("optimizer/lr")] == [
        (s, 1.0 if s <= 4 else 2.0) for s in range(1, 9)
    ]
    assert [e.step for e in events.Scalars("eval/auc")] == [8]
    tags = set(events.Tags()["scalars"])
    assert "loss/mlm" in tags
    assert not tags & {"speed/mfu", "optimizer/grad_norm"}  # None and NaN are not drawn
