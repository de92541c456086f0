"""The runs of a comparison, each a process of its own: the ordinary supervised start, watched from outside.

Guarantee: a run that crashes ends no other one. Its own checkpoints decide whether it is finished, never an exit code
alone. A run that an interrupted comparison has left at work is waited for, not started twice. An interrupt is handed
on: the ranks save and end, and the next start goes on from there.

How: `python -m launcher.supervise` with the run's own YAML file, which a person can type as well; its output goes to
RUN.log. Progress is read from the run's heartbeats.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from electra_dist.checkpoint.manifest import committed
from electra_dist.checkpoint.targets import open_targets
from electra_dist.compare.plan import Cell
from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.processes import mark_of, marked_pids

Progress = Callable[[str, int, int], None]  # what is being done, parts done, parts in all
_LOOK_S = 0.5


def saved_steps(cell: Cell) -> set[int]:
    """Steps of the run's committed checkpoints."""
    return {step for target in open_targets(cell.config) for step, _, _ in committed(target)}


class Pretrainings:
    """The runs of a comparison, each begun when it or one shortly before it in `cells` is asked for."""

    def __init__(self, cells: Sequence[Cell], ranks: int, parallel: int) -> None:
        """At most `parallel` runs of `ranks` ranks are at work at a time."""
        self._cells, self._ranks, self._parallel = cells, ranks, parallel
        self._pool = ThreadPoolExecutor(parallel)
        self._stop = threading.Event()
        self._begun: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Tells the ranks of what is still at work to save and end, and waits for them."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def result(self, cell: Cell, progress: Progress) -> str:
        """Wait for a run, while the next ones are at work beside it; returns what `pretrain` says of it."""
        begin = self._cells.index(cell)
        for each in self._cells[begin : begin + self._parallel]:
            if each.name not in self._begun:
                self._begun[each.name] = self._pool.submit(pretrain, each, self._ranks, self._pause)
        run = self._begun[cell.name]
        while not run.done():
            beat = next((beat for beat in read_heartbeats(Path(cell.config.run_dir)) if beat.rank == 0), None)
            progress("pretraining", beat.step if beat else 0, cell.marks[-1])
            wait([run], timeout=_LOOK_S)
        return run.result()

    def _pause(self) -> None:
        if self._stop.wait(_LOOK_S):
            raise _StoppedError


def pretrain(cell: Cell, ranks: int, pause: Callable[[], None]) -> str:
    """Make the run, or go on with it; nothing happens where it is finished.

    Args:
        pause: called between looks at the run; an exception of it ends the run in order.

    Returns:
        Why it is not finished, in one line; empty if it is.
    """
    code: int | None = None  # of our own start
    while cell.marks[-1] not in saved_steps(cell):
        if marked_pids(mark_of(Path(cell.config.run_dir), 0)):
            pause()
        elif code is None:
            code = _supervised(cell, ranks, pause)
        else:
            return f"it ended with exit code {code}: {_last_words(_log(cell))} ({_log(cell)})"
    return ""


class _StoppedError(Exception):
    """The comparison was interrupted."""


def _supervised(cell: Cell, ranks: int, pause: Callable[[], None]) -> int:
    """Start it, wait, and return the supervisor's exit code."""
    command = [sys.executable, "-m", "launcher.supervise", "--config", str(cell.file), "--gpus-per-node", str(ranks)]
    with _log(cell).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            pause()
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
