"""Commands under their former names still work, because queued batch scripts and users' scripts call them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import REPOSITORY


@pytest.mark.parametrize(
    "arguments", [["-m", "launcher.job", "--help"], ["-m", "electra_kernels.ahead_of_time", "-h"]]
)
def test_former_modules_can_be_run(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_the_former_job_module_records_a_job(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    begin = ["begin", str(tmp_path), "--job", "7", "--nodes", "n1,n2", "--submitted", "100", "--started", "160"]
    subprocess.run([sys.executable, "-m", "launcher.job", *begin], check=True)
    assert '"job": "7"' in (tmp_path / "slurm" / "jobs.jsonl").read_text()


def test_the_former_submit_script_prints_the_same_batch_script(tiny_config: Callable[..., Path]) -> None:
    options = ["--config", str(tiny_config()), "--nodes", "2", "--gpus-per-node", "0", "--dry-run"]
    former = [sys.executable, str(REPOSITORY / "launcher" / "submit.py")]
    command = [sys.executable, "-c", "from launcher.cli.main import main; main()", "submit"]
    texts = [
        subprocess.run([*program, *options], capture_output=True, text=True, check=True).stdout
        for program in (former, command)
    ]
    former_lines, lines = ([line for line in text.splitlines() if not line.startswith("# ")] for text in texts)
    assert former_lines == lines
    assert former_lines[0] == "#!/bin/bash"
