"""The newest records of metrics.jsonl, and the cut at a resume, against a parse of the whole file.

Fixtures: `step_record(...)` and `eval_record(...)` return example records with some fields replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_records import EVAL, STEP

from electra_dist.errors import UserError
from electra_dist.run import metrics
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.metrics import EvalRecord, MetricsWriter, StepRecord, newest_metrics, read_metrics
from electra_dist.run.records import encode

StepFactory = Callable[..., StepRecord]


def newest_of_whole_file(folder: Path) -> dict[str, Any]:
    """Return the newest record of each kind, by the standard library's JSON alone."""
    *lines, _ = (folder / METRICS_FILE).read_text().split("\n")
    records = [json.loads(line) for line in lines]
    return {record["kind"]: record for record in records}


def newest_by_kind(folder: Path) -> dict[str, Any]:
    """Return the same records as `newest_metrics` finds them."""
    return {record.kind: record.fields() for record in newest_metrics(folder) if record is not None}


def steps_of(folder: Path) -> list[tuple[str, int]]:
    """Return kind and step of each record of metrics.jsonl."""
    return [(record.kind, record.step) for record in read_metrics(folder)]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), block_bytes=st.sampled_from([100, 1000, 1 << 16]))
def test_after_any_kills_and_resumes_the_newest_metrics_are_what_a_parse_of_the_whole_file_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, block_bytes: int
):
    """A start resumes at any earlier step, and ends by `close`, or by a kill, which may leave a torn line."""
    folder = tmp_path_factory.mktemp("run")
    recorded: dict[tuple[int, str], float] = {}  # what the file must hold: (step, kind) -> loss
    reached = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("electra_dist.run.records._BACKWARD_BLOCK_BYTES", block_bytes)
        for start in range(data.draw(st.integers(1, 4))):
            begin = data.draw(st.integers(0, reached))
            writer = MetricsWriter(folder)
            assert writer.truncate_after(begin) == max([begin, *(step for step, _ in recorded)])
            recorded = {key: loss for key, loss in recorded.items() if key[0] <= begin}
            assert {(step, kind) for kind, step in steps_of(folder)} == set(recorded)
            reached = data.draw(st.integers(begin, begin + 12))
            for step in range(begin + 1, reached + 1):
                loss = start + step / 3
                if data.draw(st.booleans()):
                    writer.write(_train(step, loss))
                    recorded[step, "train"] = loss
                if data.draw(st.integers(0, 3)) == 0:
                    writer.write(_eval(step, loss))
                    recorded[step, "eval"] = loss
                if data.draw(st.integers(0, 4)) == 0:
                    writer.sync()
            assert newest_by_kind(folder) == newest_of_whole_file(folder)
            if data.draw(st.booleans()):
                writer.close()
            else:
                with open(folder / METRICS_FILE, "ab") as file:
                    file.write(b'{"kind": "eval", "st'[: data.draw(st.integers(0, 20))])
            assert newest_by_kind(folder) == newest_of_whole_file(folder)
    assert {(record.step, record.kind): record.mlm_loss for record in read_metrics(folder)} == recorded


def _train(step: int, loss: float) -> StepRecord:
    return STEP.model_copy(update={"step": step, "mlm_loss": loss})


def _eval(step: int, loss: float) -> EvalRecord:
    # The example has undefined values, which equal nothing.
    values = {name: 0.5 for name, value in vars(EVAL).items() if isinstance(value, float)}
    return EVAL.model_copy(update={**values, "step": step, "mlm_loss": loss})


def test_a_file_that_two_processes_wrote_is_put_in_order_at_the_next_resume(
    tmp_path: Path, step_record: StepFactory, eval_record: Callable[..., EvalRecord]
):
    """The older process goes on writing steps that the newer one, which resumed at step 20, repeats."""
    older = MetricsWriter(tmp_path)
    for step in (10, 20, 30):
        older.write(step_record(step=step))
    older.sync()
    newer = MetricsWriter(tmp_path)
    newer.truncate_after(20)
    older.write(step_record(step=40))
    newer.write(step_record(step=30))
    newer.write(eval_record(step=30))
    older.write(step_record(step=50))
    newer.write(step_record(step=40))
    newer.write(step_record(step=50))
    newer.close()
    assert [step for _, step in steps_of(tmp_path)] == [10, 20, 40, 30, 30, 50, 40, 50]

    third = MetricsWriter(tmp_path)
    assert third.truncate_after(40) == 50
    third.write(step_record(step=50))
    third.close()

    assert steps_of(tmp_path) == [
        ("train", 10),
        ("train", 20),
        ("train", 30),
        ("eval", 30),
        ("train", 40),
        ("train", 50),
    ]


def test_a_stray_record_of_an_earlier_process_far_before_the_cut_is_dropped(tmp_path: Path, step_record: StepFactory):
    writer = MetricsWriter(tmp_path)
    for step in (10, 20, 40, 30, *range(40, 3000, 10)):  # the older process wrote the first 40
        writer.write(step_record(step=step))

    assert writer.truncate_after(2000) == 2990
    writer.close()

    assert [step for _, step in steps_of(tmp_path)] == [*range(10, 2001, 10)]


def test_a_resume_keeps_the_file_and_reads_only_its_end(
    tmp_path: Path, step_record: StepFactory, monkeypatch: pytest.MonkeyPatch
):
    """The records that remain are not written again: the file stays the same one, and few of its lines are parsed."""
    writer = MetricsWriter(tmp_path)
    for step in range(1, 3001):
        writer.write(step_record(step=step))
    writer.close()
    inode = os.stat(tmp_path / METRICS_FILE).st_ino
    whole_lines = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)
    parsed = []
    parse_line = metrics.parse_line
    monkeypatch.setattr(metrics, "parse_line", lambda *line: parsed.append(line) or parse_line(*line))

    resumed = MetricsWriter(tmp_path)
    assert resumed.truncate_after(2950) == 3000
    resumed.close()

    assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(whole_lines[:2950])
    assert os.stat(tmp_path / METRICS_FILE).st_ino == inode
    assert len(parsed) <= 60
    parsed.clear()
    newest = newest_metrics(tmp_path, with_evaluation=False)
    assert newest.step is not None and newest.step.step == 2950
    assert len(parsed) == 1


def test_a_record_without_kind_or_step_is_a_user_error(tmp_path: Path):
    (tmp_path / METRICS_FILE).write_bytes(encode(STEP) + encode({"step": "x"}))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: the value of `kind` is wrong"):
        MetricsWriter(tmp_path).truncate_after(1)
