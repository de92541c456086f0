"""Job names: each run folder has its own. The rest of a submission is tested through `electra-dist submit`."""

from __future__ import annotations

from pathlib import Path

from launcher.slurm.submission import job_name


def test_two_run_folders_never_share_a_job_name():
    names = {job_name(Path(path)) for path in ("/a/run", "/b/run", "/a/r n", "/a/r:n", "/a/...")}
    assert len(names) == 5
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") for name in names)
