"""`electra-dist status` on a run of 100,000 records: its answer is that of a full reading, and its memory is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_memory import run_command
from support.long_runs import write_long_run
from support.run_records import STEP

from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.records import encode

NUM_RECORDS = 100_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with 100,000 training records and 200 evaluations."""
    return write_long_run(tmp_path_factory.mktemp("runs") / "long", NUM_RECORDS)


@pytest.mark.sample
def test_status_of_a_long_run_gives_the_newest_records_in_60_mb(run: Path):
    last_lines = (run / METRICS_FILE).read_bytes().splitlines()[-1000:]
    newest = {record["kind"]: record for record in map(json.loads, last_lines)}

    output, memory_mb = run_command(["status", str(run), "--json"])

    shown = json.loads(output)
    assert shown["step"] == NUM_RECORDS == newest["train"]["step"]
    assert (shown["loss"], shown["step_s"]) == (newest["train"]["loss"], newest["train"]["step_s"])
    assert shown["context_auc"] == newest["eval"]["context_auc"]
    assert shown["checkpoint"]["step"] == NUM_RECORDS
    assert memory_mb < 60


def test_status_shows_a_run_whose_newer_version_adds_fields_and_kinds_of_records(run: Path):
    """A record of another kind, and other fields in those that are known, change nothing."""
    with open(run / METRICS_FILE, "ab") as file:
        file.write(encode({**STEP.fields(), "step": 100001, "loss": 7.5, "nested": {"list": [1, {}]}}))
        file.write(b'{"kind": "probe", "step": 100002, "what": null}\n')

    output, _ = run_command(["status", str(run)])

    assert "100,001 of 100,000" in output
    assert "loss 7.5000" in output
