"""A short run of the drill of S3's ways to fail, which shows that a whole run survives one and the script works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).resolve().parents[1] / "drills" / "s3_ways.py"


@pytest.mark.sample
def test_a_run_behind_a_proxy_that_answers_with_pages_has_the_losses_of_local_files() -> None:
    command = [sys.executable, str(DRILL), "--server", "moto", "--ways", "page of a proxy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("1 good, 0 bad")
    assert "exit 0, 9 of 9 losses equal" in done.stdout
