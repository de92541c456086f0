"""Makes the pretraining runs of a comparison, each by an ordinary supervisor in a process of its own.

Guarantee: a run that crashes does not end any other run. Whether a run is finished is decided by its own checkpoints,
never by an exit code alone. A run that an interrupted comparison left running is waited for, not started twice. An
interrupt is passed on to the ranks, which save a checkpoint and end; the next start continues from it.

How: `python -m launcher.supervise` with the YAML file of the run, a command that a user can run as well. Its output is
appended to RUN.log. Progress is read from the heartbeats of the run.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from electra_dist.checkpoint.checkpoint_manifest import committed
from electra_dist.checkpoint.checkpoint_stores import open_targets
from electra_dist.compare.comparison_plan import Cell
from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.marked_processes import mark_of, marked_pids

Progress = Callable[[str, int, int], None]  # called with (activity, parts done, parts in total)
_POLL_S = 0.5  # seconds between checks of a run


def saved_steps(cell: Cell) -> set[int]:
    """Return the steps of the complete checkpoints of a run; an unfinished checkpoint does not count."""
    steps = set()
    for target in open_targets(cell.config):
        for step, _, _ in committed(target):
            steps.add(step)
    return steps


class Pretrainings:
    """Pool of the runs of a comparison, of which a limited number train at the same time.

    Use it as a context manager, and call `result` for the runs in order. A run starts when its result, or that of one
    of the `parallel - 1` runs before it, is requested.
    """

    def __init__(self, cells: Sequence[Cell], ranks: int, parallel: int) -> None:
        """Prepare the pool; no run is started yet.

        Args:
            cells: all runs, in the order in which their results will be requested.
            ranks: ranks of each run.
            parallel: number of runs that may train at the same time.
        """
        self._cells = cells
        self._ranks = ranks
        self._parallel = parallel
        self._pool = ThreadPoolExecutor(parallel)
        self._stop = threading.Event()
        self._started: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        """Return the pool itself; no run is started yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop all runs that are still training, and wait until their ranks have saved a checkpoint and ended.

        Runs that wait for their turn are not started.
        """
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def result(self, cell: Cell, progress: Progress) -> str:
        """Wait for a run to end, while the runs after it train at the same time, up to `parallel` in all.

        Args:
            cell: one of the runs of the pool; it is started if it is not running yet.
            progress: called every half second with ("pretraining", steps done, steps in total).

        Returns:
            Why the run is not finished, in one line; empty if it is.
        """
        first = self._cells.index(cell)
        due_cells = self._cells[first : first + self._parallel]  # this run, and those that may train beside it
        for due_cell in due_cells:
            if due_cell.name not in self._started:
                self._started[due_cell.name] = self._pool.submit(pretrain, due_cell, self._ranks, self._pause)
        run = self._started[cell.name]
        while not run.done():
            progress("pretraining", _current_step(cell), cell.marks[-1])
            wait([run], timeout=_POLL_S)
        return run.result()

    def _pause(self) -> None:
        """Sleep between two checks of a run; raise `_StoppedError` as soon as the pool of runs is closed."""
        if self._stop.wait(_POLL_S):
            raise _StoppedError


def pretrain(cell: Cell, ranks: int, pause: Callable[[], None]) -> str:
    """Start or continue a run, and wait until it ends; a finished run is not started again.

    If processes of the run are already at work on this machine, they are waited for, and a start follows only if they
    end without finishing the run. The run is started at most once per call.

    Args:
        cell: the run.
        ranks: ranks of the run.
        pause: called between checks of the run. If it raises, the run saves a checkpoint and ends, and the exception
            passes on.

    Returns:
        Why the run is not finished, in one line; empty if it is.
    """
    last_step = cell.marks[-1]
    # The value of an environment variable by which the run's processes on this machine are found.
    process_mark = mark_of(Path(cell.config.run_dir), node=0)
    exit_code: int | None = None  # of the supervisor that this call has started
    while last_step not in saved_steps(cell):
        is_running = bool(marked_pids(process_mark))
        if is_running:
            pause()  # an earlier, interrupted comparison has started the run, which still trains
        elif exit_code is None:
            exit_code = _supervise(cell, ranks, pause)
        else:
            log = _log_file(cell)
            return (
                f"the run ended with exit code {exit_code}: {_last_error(log)}; "
                f"read {log}, correct the cause and repeat the command"
            )
    return ""


class _StoppedError(Exception):
    """Error: the comparison was interrupted, so its runs must be stopped."""


def _current_step(cell: Cell) -> int:
    """Return the optimizer step that rank 0 of a run reports in its heartbeat file; 0 if there is none yet."""
    for beat in read_heartbeats(Path(cell.config.run_dir)):
        if beat.rank == 0:
            return beat.step
    return 0


def _supervise(cell: Cell, ranks: int, pause: Callable[[], None]) -> int:
    """Start the supervisor of a run, wait for it and return its exit code.

    The supervisor's output is appended to the run's log.

    Args:
        cell: the run.
        ranks: ranks of the run, all on this machine.
        pause: called between checks of the supervisor. If it raises, the supervisor receives SIGTERM, and the
            exception passes on after the supervisor has ended.
    """
    command = [sys.executable, "-m", "launcher.supervise", "--config", str(cell.file), "--gpus-per-node", str(ranks)]
    with _log_file(cell).open("ab") as log:
        # In a session of its own, the supervisor does not receive Ctrl-C from the terminal directly.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            pause()
    finally:
        process.terminate()  # no effect if the process has ended; otherwise its ranks save a checkpoint and end
        process.wait()
    return process.returncode


def _log_file(cell: Cell) -> Path:
    """Return the path of the log with the output of a run's supervisor and ranks, beside the run's folder."""
    return Path(f"{cell.config.run_dir}.log")


def _last_error(log: Path) -> str:
    """Return the last line of a log that starts with "error: ", or its last line if there is no such line.

    Blank lines do not count; a log without any other line gives "the log is empty".
    """
    last_line = "the log is empty"
    last_error = ""
    for line in log.read_text(errors="replace").splitlines():
        text = line.strip()
        if text:
            last_line = text
        if text.startswith("error: "):
            last_error = text
    return last_error or last_line
