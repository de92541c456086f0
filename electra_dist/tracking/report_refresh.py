"""Rewrite report.html at regular intervals while a run goes on, in a separate process.

Guarantee: no training step waits for the process, and its failure does not affect the run. At most one such process
exists, and none after `close`. An update takes 2 to 7 s of one processor core at a low priority.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_MODULE = "electra_dist.report.report_page"  # writes the report of the folder that is its argument
_NICENESS = 10  # a tenth of a training process's share, where processor cores are short


class ReportRefresh:
    """Starter of the processes that write report.html. Only rank 0 has one; call `close` before the last report."""

    def __init__(self, run_dir: Path, every_minutes: float) -> None:
        self._run_dir = run_dir
        self._every_s = 60 * every_minutes
        self._next = time.monotonic() + self._every_s
        self._process: subprocess.Popen[bytes] | None = None

    def update_if_due(self) -> None:
        """Start the process that writes the report, if the interval is over and the last process has ended."""
        if self._every_s <= 0 or time.monotonic() < self._next:
            return
        is_running = self._process is not None and self._process.poll() is None
        if is_running:
            return
        self._next = time.monotonic() + self._every_s
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                ["nice", "-n", str(_NICENESS), sys.executable, "-m", _MODULE, str(self._run_dir)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:  # no memory for a process, or no `nice`: the report at the end of the start is written anyway
            self._every_s = 0

    def close(self) -> None:
        """Kill the process if it is still writing, so that it cannot replace the final report by an older one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
