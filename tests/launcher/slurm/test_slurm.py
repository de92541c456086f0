"""The output of squeue and sinfo is parsed: held jobs, and nodes that Slurm does not use."""

from __future__ import annotations

from pathlib import Path

import pytest
from electra_launcher.slurm.slurm import parse_jobs, parse_nodes, queue_view


def test_parsing_finds_held_jobs_and_lists_each_unused_node_once_with_its_reason():
    held = parse_jobs(["7|PENDING||launch failed requeued held", "9|RUNNING|n[1-2]|None"])
    assert [job.is_held for job in held] == [True, False]
    lines = ["n1|drained|Duplicate jobid", "n1|drained|Duplicate jobid", "n2|down*|Not responding | at all"]
    assert [out.node for out in parse_nodes(lines)] == ["n1", "n2"]
    assert parse_nodes(lines)[1].reason == "Not responding | at all"


def test_the_reason_of_a_job_may_hold_the_separator_and_a_line_of_another_form_is_ignored():
    [job] = parse_jobs(["7|PENDING||held | by a | person", "slurm_load_jobs error: timed out", "8|RUNNING|n1"])
    assert (job.job, job.state, job.nodes, job.reason) == ("7", "PENDING", "", "held | by a | person")


def test_a_reason_that_an_administrator_wrote_in_another_encoding_is_shown_as_far_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, line in (("squeue", r"7|PENDING||h\351ld"), ("sinfo", r"n1|drained|d\351fectueux")):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{line}\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    view = queue_view("run")
    assert view is not None
    assert view.jobs[0].reason == "h\N{REPLACEMENT CHARACTER}ld"
    assert view.out[0].reason == "d\N{REPLACEMENT CHARACTER}fectueux"
