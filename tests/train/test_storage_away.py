"""Real runs on disks that fill, and on a folder that is read-only at first: a sample of the drill full_disks.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.real_runs import REPOSITORY
from support.small_disks import can_mount


@pytest.mark.multiproc
@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount a tmpfs")
def test_a_run_on_a_disk_that_fills_has_the_losses_of_an_undisturbed_one() -> None:
    """The drill prints a line for each case and ends with 1 if one has other losses, a wrong code or a traceback."""
    cases = ["run folder, full", "run folder, read-only at start"]
    command = [sys.executable, str(REPOSITORY / "tests" / "drills" / "full_disks.py"), "--only", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exit 0, losses equal") == len(cases), done.stdout
    assert "status: the run folder: " in done.stdout
