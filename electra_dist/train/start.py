"""Hold what one start of a run works with, once its engine is built, and measure where its time goes.

Goodput, the useful part of the time, is computed from the fields `setup_s` and `spent_s` of ledger.jsonl
(run/goodput.py), in seconds:

    setup_s   import: process start to the first line of the run; build: inputs, process group, model, engine;
              restore: checkpoint
    spent_s   since the first step began: first (the first step: compilation, warm-up), step (all other steps),
              data (waiting for rows, within them), stall (checkpoint copies and waits), eval

All times are elapsed times on rank 0's host, by clocks that do not jump; no measurement waits for the device.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from electra_kernels.operation_types import SpecialIds

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.store.patience import Patience
from electra_dist.train.guard import SkipList
from electra_dist.train.inputs import RunInputs
from electra_dist.train.monitor import RankMonitor
from electra_dist.train.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class Start:
    """What one start of a run makes once on this rank, and all its rounds share.

    A round leads from a restored checkpoint to the last step, a stop, or a rollback, after which another one begins.
    """

    config: Config  # with the micro-batch that this number of ranks and this memory allow
    inputs: RunInputs
    engine: Engine
    special: SpecialIds
    skips: SkipList
    stop: StopRequest
    monitor: RankMonitor
    patience: Patience  # with storage that is full or away


class Clock:
    """Stopwatch of one round of a run: seconds of its setup, and seconds since then by activity.

    A round lasts from the restore of a checkpoint to the end of the process or to a rollback. Only the thread of the
    step loop may use the clock.
    """

    def __init__(self, setup_s: dict[str, float]) -> None:
        self.setup_s = setup_s
        self._spent = {"first": 0.0, "step": 0.0, "data": 0.0, "stall": 0.0, "eval": 0.0}
        self._is_first_step_done = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure a `with` block as one step, its wait for data included. A block that raises is not counted."""
        begin = time.perf_counter()
        yield
        # The first step is counted apart from the others, because compilation and warm-up make it longer.
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
        """Add the seconds that a save has blocked the step loop: its wait for the last save, and the copying."""
        self._spent["stall"] += seconds

    def waited_for_data(self, total_s: float) -> None:
        """Record the total seconds for which the step loop has waited for rows since the round began."""
        self._spent["data"] = total_s  # a total, not an increment

    def spent_s(self) -> dict[str, float]:
        """Return the seconds spent so far on each activity, rounded to milliseconds.

        The time of "data" is also contained in "first" and "step"; the other activities do not overlap.
        """
        return {name: round(seconds, 3) for name, seconds in self._spent.items()}


def seconds_since_process_start() -> float:
    """Return the seconds since the operating system started this process, by a clock that does not jump."""
    # The text before the last ")" is the name of the program. The 22nd field is the start in ticks since the boot.
    fields_after_name = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started_s = int(fields_after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
