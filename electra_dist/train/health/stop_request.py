"""Being told to stop or to save: signals, the end of a Slurm job, and two files in the run folder.

Guarantee: handlers only set a flag; nothing else happens inside one. The flags of all ranks are added up in the step's
all-reduce (`train/step.py`), so that a signal to any one rank stops all of them after the same step, with a
checkpoint, and exit code 75.

    SIGTERM, SIGINT, SIGUSR1, SIGUSR2    stop        (a second SIGINT interrupts at once)
    RUN/stop                             stop        touch it; removed when obeyed
    RUN/save                             save now    touch it; removed when obeyed
    SLURM_JOB_END_TIME                   stop (longest step + longest save) x 2 ahead of it

Threads are told by the process; there are no worker processes that a signal could kill first.

Cost: two `stat` calls a step, on rank 0.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from electra_dist.run.folder import SAVE_FILE, STOP_FILE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_LEAST_MARGIN_S = 10.0


class StopRequest:
    """This rank's view of whether to stop or save. Install it in the main thread, before anything slow."""

    def __init__(self, run_dir: Path, is_first_rank: bool) -> None:
        """Install the handlers. Rank 0 also watches the files and the clock."""
        self._reason = ""
        self._stop_file, self._save_file = run_dir / STOP_FILE, run_dir / SAVE_FILE
        self._watches = is_first_rank
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        self._end_time = float(end) if end.isdigit() else None
        self.longest_step_s = 0.0
        self.longest_save_s = 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._reason:
            raise KeyboardInterrupt
        self._reason = signal.Signals(number).name

    def wants_stop(self) -> bool:
        """Whether this rank has been told to stop."""
        if not self._reason and self._watches:
            if self._stop_file.exists():
                self._reason = f"file {self._stop_file}"
            elif self._end_time is not None and time.time() > self._end_time - self.margin_s:
                self._reason = f"the job ends in {self._end_time - time.time():.0f} s"
        return bool(self._reason)

    def wants_save(self) -> bool:
        """Whether this rank has been told to save and go on."""
        return self._watches and self._save_file.exists()

    @property
    def margin_s(self) -> float:
        """How long before the job's end the run stops by itself."""
        return max(_LEAST_MARGIN_S, 2.0 * (self.longest_step_s + self.longest_save_s))

    @property
    def reason(self) -> str:
        """Why, as this rank knows it."""
        return self._reason or "another rank was told to"

    def saved(self) -> None:
        """A save has begun: take its switch file away. Rank 0 only."""
        self._save_file.unlink(missing_ok=True)

    def stopped(self) -> None:
        """The run stops: take the switch file away. Rank 0 only."""
        self._stop_file.unlink(missing_ok=True)
