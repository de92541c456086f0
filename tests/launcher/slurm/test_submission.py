"""Job names: each run folder has its own. The rest of a submission is tested through `electra-dist submit`."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.slurm.submission import job_name


def test_two_run_folders_never_share_a_job_name():
    names = {job_name(Path(path)) for path in ("/a/run", "/b/run", "/a/r n", "/a/r:n", "/a/...")}
    assert len(names) == 5
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") for name in names)


def test_a_run_folder_whose_name_is_no_utf8_has_a_job_name_of_its_own() -> None:
    """Waiting jobs are found by the name that an earlier version gave them, so the names of other folders stay."""
    assert job_name(Path("/a/run")) == "run-ea75360d"
    names = {job_name(Path(os.fsdecode(path))) for path in (b"/a/run-\xff", b"/a/run-\xfe")}
    assert len(names) == 2 and all(name.startswith("run-") for name in names)
