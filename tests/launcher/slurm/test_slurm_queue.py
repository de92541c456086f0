"""The output of squeue and sinfo is parsed: held jobs, and nodes that Slurm does not use."""

from __future__ import annotations

from launcher.slurm.slurm_queue import parse_jobs, parse_nodes


def test_parsing_finds_held_jobs_and_lists_each_unused_node_once_with_its_reason():
    held = parse_jobs(["7|PENDING||launch failed requeued held", "9|RUNNING|n[1-2]|None"])
    assert [job.is_held for job in held] == [True, False]
    lines = ["n1|drained|Duplicate jobid", "n1|drained|Duplicate jobid", "n2|down*|Not responding | at all"]
    assert [out.node for out in parse_nodes(lines)] == ["n1", "n2"]
    assert parse_nodes(lines)[1].reason == "Not responding | at all"


def test_the_reason_of_a_job_may_hold_the_separator_and_a_line_of_another_form_is_ignored():
    [job] = parse_jobs(["7|PENDING||held | by a | person", "slurm_load_jobs error: timed out", "8|RUNNING|n1"])
    assert (job.job, job.state, job.nodes, job.reason) == ("7", "PENDING", "", "held | by a | person")
