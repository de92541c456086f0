"""Measure where the time of a start goes, in seconds, for the ledger's `setup_s` and `spent_s` and for goodput.

    setup_s   import: process start to the first line of the run; build: inputs, process group, model, engine;
              restore: checkpoint
    spent_s   since the first step began: first (the first step: compilation, warm-up), step (all other steps),
              data (waiting for rows, within them), stall (checkpoint copies and waits), eval

It is the wall clock of rank 0; nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil


class Clock:
    """Stopwatch of one round of a run: seconds of its setup, and seconds of its steps by activity.

    A round lasts from the restore of a checkpoint to the end of the process or to a rollback. Only the thread of the
    step loop may use the clock.
    """

    def __init__(self, setup_s: dict[str, float]) -> None:
        """Store the seconds that the setup took, and start the counters of the steps at 0.

        Args:
            setup_s: seconds of each part of the setup: "import", "build" and "restore"; after a rollback "restore"
                only.
        """
        self.setup_s = setup_s
        self._spent = {"first": 0.0, "step": 0.0, "data": 0.0, "stall": 0.0, "eval": 0.0}
        self._is_first_step_done = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure a `with` block as one step, its wait for data included.

        The first step is counted apart from the others, because it compiles and warms up. A block that raises is not
        counted.
        """
        begin = time.perf_counter()
        yield
        activity = "step" if self._is_first_step_done else "first"
        self._spent[activity] += time.perf_counter() - begin
        self._is_first_step_done = True

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measure a `with` block as an evaluation on held-out rows. A block that raises is not counted."""
        begin = time.perf_counter()
        yield
        self._spent["eval"] += time.perf_counter() - begin

    def stalled(self, seconds: float) -> None:
        """Add the seconds for which saving a checkpoint has held up the step loop, counted as "stall"."""
        self._spent["stall"] += seconds

    def waited_for_data(self, total_s: float) -> None:
        """Record that the loop has waited `total_s` seconds for rows since this start; replaces the earlier total."""
        self._spent["data"] = total_s

    def spent_s(self) -> dict[str, float]:
        """Return the seconds spent so far, rounded to milliseconds: first, step, data, stall and eval.

        They are the first step, all other steps, waiting for rows, being held up by saves, and evaluations. "data" is
        part of "first" and "step"; the others do not overlap.
        """
        return {name: round(seconds, 3) for name, seconds in self._spent.items()}


def seconds_since_process_start() -> float:
    """Return the seconds since the operating system started this process, by the wall clock.

    Called at the beginning of a run, this is the time that the interpreter and the imports have taken.
    """
    return time.time() - psutil.Process().create_time()
