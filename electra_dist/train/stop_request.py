"""Receive requests to stop or to save: signals, the end of a Slurm job, and two files in the run folder.

Guarantee: signal handlers only set a flag; nothing else happens inside one. The flags of all ranks are added up in the
step's all-reduce (`train/step.py`), so that a signal to any one rank stops all of them after the same step, with a
checkpoint, and exit code 75.

    SIGTERM, SIGINT, SIGUSR1, SIGUSR2    stop        (a second SIGINT interrupts at once, without a save)
    INTERRUPT_SIGNAL                     stop        reported as Ctrl-C, which the supervisor passes on by it
    UNWATCHED_SIGNAL                     stop        of a rank to itself, because its supervisor was killed
    SIGHUP (the terminal was closed)     stop        unless the run was started with nohup, which ignores it
    RUN/stop                             stop        create it (touch); removed once the run has saved and stops
    RUN/save                             save now    create it (touch); removed when the save begins
    SLURM_JOB_END_TIME                   stop at 2 x (longest step + longest save) before it, at least 10 s

Rows are read and checkpoints are written by threads of this process, so there are no worker processes that a signal
could end before the checkpoint is saved.

Cost: two `stat` calls per step, on rank 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from types import FrameType

from electra_dist.errors import StoreError
from electra_dist.run.folder import SAVE_FILE, STOP_FILE
from electra_dist.store.atomic_files import read_regular

# Passed on by a supervisor that was interrupted. It is not SIGINT, because Ctrl-C often reaches the ranks directly,
# too, and a second SIGINT ends a rank without a save. No library in use claims this signal.
INTERRUPT_SIGNAL = signal.SIGRTMIN + 6
UNWATCHED_SIGNAL = signal.SIGRTMIN + 5  # no library in use claims this one either
INTERRUPTED = "interrupted (Ctrl-C)"  # the reason of such a stop, and the content of the file `stop` that asks for it
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    INTERRUPT_SIGNAL,
    UNWATCHED_SIGNAL,
)
_REASONS = {
    signal.SIGINT: INTERRUPTED,
    INTERRUPT_SIGNAL: INTERRUPTED,
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
    UNWATCHED_SIGNAL: "its supervisor was killed",
}  # of the signals whose names do not say why the run stops
_JOB_END = "SLURM_JOB_END_TIME"  # variable of the environment, in Unix seconds
_UNIX_TIME = re.compile(r"[0-9]{1,12}")  # Slurm may also say "Unknown".
_LEAST_MARGIN_S = 10.0  # between the request to stop and the end of the Slurm job
_SAFETY_FACTOR = 2.0  # of the margin, because the next step and save may take longer than those so far


class JobEndTime:
    """Time at which the Slurm job ends, by the monotonic clock, which nobody can set; `monotonic` is None if unknown.

    Slurm gives a Unix time, which is converted once. A supervisor passes the time on to the ranks that it starts,
    converted back to Unix time by the wall clock of that moment.
    """

    def __init__(self) -> None:
        unix_time = os.environ.get(_JOB_END, "")
        self.monotonic: float | None = None
        if _UNIX_TIME.fullmatch(unix_time):
            self.monotonic = time.monotonic() + float(unix_time) - time.time()

    def environment(self) -> dict[str, str]:
        """Return {"SLURM_JOB_END_TIME": ...}, which tells a new process when the job ends; {} if that is unknown."""
        if self.monotonic is None:
            return {}
        return {_JOB_END: str(round(self.monotonic - time.monotonic() + time.time()))}


class StopRequest:
    """The requests to stop or save that this rank has received; creating it installs the signal handlers.

    Create it in the main thread, before anything slow, so that an early signal is not lost. The step loop calls
    `wants_stop` and `wants_save` before every step that is not skipped; the step adds up the answers of all ranks.
    Only rank 0 watches the files and the end of the job.
    """

    def __init__(self, run_dir: Path, is_first_rank: bool) -> None:
        self.reason = ""  # why to stop: a signal, the file `stop`, the end of the job; empty without a request
        self._was_passed_on = False  # whether a SIGINT that comes now may be the one that a supervisor has passed on
        self._stop_file = run_dir / STOP_FILE
        self._save_file = run_dir / SAVE_FILE
        self._watches = is_first_rank
        self._was_saved = False  # whether the file `save` was obeyed and could not be removed
        self._job_end = JobEndTime().monotonic
        self.longest_step_s = 0.0  # set by the step loop
        self.longest_save_s = 0.0  # set by rank 0's checkpoint thread
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal as a request to stop; raise KeyboardInterrupt on a Ctrl-C after an earlier request."""
        if number == signal.SIGINT and self.reason and not self._was_passed_on:
            raise KeyboardInterrupt
        self._was_passed_on = number == INTERRUPT_SIGNAL
        self.reason = _REASONS.get(number) or signal.Signals(number).name

    def wants_stop(self) -> bool:
        """Return whether this rank has received a request to stop: a signal or, on rank 0, a file or the job's end.

        Once the answer is True, it stays True.
        """
        if self._watches and not self.reason:
            reason = self._find_reason()
            if reason:  # an empty text must not overwrite the reason of a signal that arrives meanwhile
                self.reason = reason
        return bool(self.reason)

    def _find_reason(self) -> str:
        if self._stop_file.exists():
            if self._is_of_interrupt():
                return INTERRUPTED
            # launcher/electra_launcher/slurm/job.py recognises this reason by its first word.
            return f"file {self._stop_file}"
        if self._job_end is None:
            return ""
        remaining_s = self._job_end - time.monotonic()
        if remaining_s < self.margin_s:
            return f"the job ends in {remaining_s:.0f} s"
        return ""

    def _is_of_interrupt(self) -> bool:
        """Return whether `electra-dist train` on another host has made the file `stop` after Ctrl-C."""
        with contextlib.suppress(OSError, StoreError):  # a person may have made it of any kind
            return read_regular(self._stop_file) == INTERRUPTED.encode()
        return False

    def wants_save(self) -> bool:
        """Return whether the user has requested a checkpoint by the file `save`; False on ranks other than 0."""
        if not self._watches:
            return False
        is_requested = self._save_file.exists()
        self._was_saved = self._was_saved and is_requested  # a file that is gone may be created again
        return is_requested and not self._was_saved

    @property
    def margin_s(self) -> float:
        """Return how many seconds before the end of the Slurm job the run stops: room for a step and a save."""
        return max(_LEAST_MARGIN_S, _SAFETY_FACTOR * (self.longest_step_s + self.longest_save_s))

    def remove_save_file(self) -> None:
        """Remove the file `save`, because its request is fulfilled; if that fails, ignore the file. Rank 0 only."""
        try:
            self._save_file.unlink(missing_ok=True)
        except OSError:
            self._was_saved = True  # until somebody has removed the file

    def remove_stop_file(self) -> None:
        """Remove the file `stop`, so that a restart does not stop at once; a failure is ignored. Rank 0 only."""
        with contextlib.suppress(OSError):
            self._stop_file.unlink(missing_ok=True)
