"""One run of a comparison, as a process of its own: the ordinary supervised start, watched from outside.

Guarantee: a run that crashes ends no other one. Its own checkpoints decide whether it is finished, never an exit code
alone. A run that an interrupted comparison has left at work is waited for, not started twice. An interrupt is handed
on: the ranks save and end, and the next start goes on from there.

How: `python -m launcher.supervise` with the run's own YAML file, which a person can type as well; its output goes to
RUN.log. Progress is read from the run's heartbeats.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from electra_dist.checkpoint.manifest import committed
from electra_dist.checkpoint.targets import open_targets
from electra_dist.compare.plan import Cell
from electra_dist.telemetry.heartbeat import read_heartbeats
from launcher.ranks import mark_of, marked_pids

Progress = Callable[[str, int, int], None]  # what is being done, parts done, parts in all
_LOOK_S = 0.5


def saved_steps(cell: Cell) -> set[int]:
    """Steps of the run's committed checkpoints."""
    return {step for target in open_targets(cell.config) for step, _, _ in committed(target)}


def pretrain(cell: Cell, ranks: int, progress: Progress) -> str:
    """Make the run, or go on with it; nothing happens where it is finished.

    Returns:
        Why it is not finished, in one line; empty if it is.
    """
    last, run_dir = cell.marks[-1], Path(cell.config.run_dir)

    def look() -> None:
        beat = next((beat for beat in read_heartbeats(run_dir) if beat.rank == 0), None)
        progress("pretraining", beat.step if beat else 0, last)
        time.sleep(_LOOK_S)

    code: int | None = None  # of our own start
    while last not in saved_steps(cell):
        if marked_pids(mark_of(run_dir, 0)):
            look()
        elif code is None:
            code = _supervised(cell, ranks, look)
        else:
            return f"it ended with exit code {code}: {_last_words(_log(cell))} ({_log(cell)})"
    return ""


def _supervised(cell: Cell, ranks: int, look: Callable[[], None]) -> int:
    """Start it, look on, and return the supervisor's exit code."""
    command = [sys.executable, "-m", "launcher.supervise", "--config", str(cell.file), "--gpus-per-node", str(ranks)]
    with _log(cell).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            look()
    finally:
        process.terminate()  # nothing to one that has ended; else it tells the ranks, which save
        process.wait()
    return process.returncode


def _log(cell: Cell) -> Path:
    return Path(f"{cell.config.run_dir}.log")


def _last_words(log: Path) -> str:
    """The last error of a log, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no word of why"])[-1]
