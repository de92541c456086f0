"""What squeue and sinfo print is read: held jobs, and nodes that are out."""

from __future__ import annotations

from launcher.slurm.queue import parse_jobs, parse_nodes


def test_what_squeue_and_sinfo_print_is_read():
    held = parse_jobs(["7|PENDING||launch failed requeued held", "9|RUNNING|n[1-2]|None"])
    assert [job.is_held for job in held] == [True, False]
    lines = ["n1|drained|Duplicate jobid", "n1|drained|Duplicate jobid", "n2|down*|Not responding | at all"]
    assert [out.node for out in parse_nodes(lines)] == ["n1", "n2"]
    assert parse_nodes(lines)[1].reason == "Not responding | at all"
