"""Measures the memory of a command, in a process of its own, above what a bare Python process has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

_PROGRAM = "import sys; sys.argv[0] = 'electra-dist'; from launcher.cli.main import main; main()"


def run_command(arguments: Sequence[str]) -> tuple[str, float]:
    """Run `electra-dist` with arguments; return its output and its memory at its peak above that of bare Python, MB.

    The command must end with exit code 0.
    """
    output, peak_mb = _run([sys.executable, "-c", _PROGRAM, *arguments])
    _, bare_mb = _run([sys.executable, "-c", "pass"])
    return output, peak_mb - bare_mb


def _run(command: Sequence[str]) -> tuple[str, float]:
    """Run a process to its end; return its output and its peak memory in 1e6 bytes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    return output, usage.ru_maxrss * 1024 / 1e6
