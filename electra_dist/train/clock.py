"""Where a start's time goes, in seconds: what the ledger's `setup_s` and `spent_s` hold and goodput is made of.

    setup_s   import: process start to here; build: inputs, process group, model, engine; restore: checkpoint
    spent_s   since the first step began: first (the first step: compilation, warm-up), step (all other steps),
              data (waiting for rows, within them), stall (checkpoint copies and waits), eval

Rank 0's wall clock; nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil


class Clock:
    """One per start or rollback."""

    def __init__(self, setup_s: dict[str, float]) -> None:
        self.setup_s = setup_s
        self._spent = {"first": 0.0, "step": 0.0, "data": 0.0, "stall": 0.0, "eval": 0.0}
        self._stepped = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, its wait for data included."""
        begin = time.perf_counter()
        yield
        self._spent["step" if self._stepped else "first"] += time.perf_counter() - begin
        self._stepped = True

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation."""
        begin = time.perf_counter()
        yield
        self._spent["eval"] += time.perf_counter() - begin

    def stalled(self, seconds: float) -> None:
        """A save held the loop up."""
        self._spent["stall"] += seconds

    def waited_for_data(self, total_s: float) -> None:
        """How long the loader has been waited for in all."""
        self._spent["data"] = total_s

    def spent_s(self) -> dict[str, float]:
        """Everything so far, rounded to milliseconds."""
        return {name: round(seconds, 3) for name, seconds in self._spent.items()}


def seconds_since_process_start() -> float:
    """Interpreter, imports and all else that came before."""
    return time.time() - psutil.Process().create_time()
