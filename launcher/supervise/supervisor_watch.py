"""End a rank whose supervisor has ended, so that no rank trains on unwatched, whatever killed the supervisor.

Guarantee: when the supervisor's process ends while the rank runs, the rank saves a checkpoint and stops, as after
SIGTERM. A rank that has not installed its signal handlers yet has nothing to save; it ends at once with exit code 75.
A rank that has not ended `_GRACE_S` seconds later ends without a save, with exit code 1.

How: the supervisor writes its own identity into the file `supervisor` of the ranks' state folder (rank_processes.py).
A thread in each rank waits for the end of that process. The kernel's death signal (PR_SET_PDEATHSIG) would not do,
because a rank's parent is DeepSpeed's launcher, which the supervisor ends before its ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import threading
import time
from pathlib import Path

from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED
from electra_dist.escapes import printable
from electra_dist.run.processes import ProcessIdentity, is_running, this_process
from electra_dist.store.atomic_files import is_private

_GRACE_S = 120.0  # how long the rank may take to save and end
_POLL_S = 1.0  # between two looks at the supervisor, on a kernel without pidfd_open (before Linux 5.3)
_SUPERVISOR_FILE = "supervisor"
_MARK_FILE = "mark"


def write_owner(state: Path, mark: str) -> None:
    """Record in a new state folder that it belongs to this process, the supervisor of the run and node in `mark`."""
    (state / _SUPERVISOR_FILE).write_text(json.dumps(dataclasses.asdict(this_process())), "ascii")
    # A folder without this file is never deleted as one of this run.
    (state / _MARK_FILE).write_bytes(os.fsencode(mark))


def is_state_folder_of(state: Path, mark: str) -> bool:
    """Return whether a state folder was made by a supervisor of the run and node that `mark` names."""
    try:
        # The folder is in a shared directory: nothing is read in one that another user may have made.
        return is_private(state) and (state / _MARK_FILE).read_bytes() == os.fsencode(mark)
    except OSError:
        return False


def read_supervisor(state: Path) -> ProcessIdentity:
    """Return the process that made a state folder: the supervisor of the ranks that use the folder."""
    return ProcessIdentity(**json.loads((state / _SUPERVISOR_FILE).read_text("ascii")))


def watch_supervisor(supervisor: ProcessIdentity, rank: int) -> None:
    """Start a thread that waits until this rank's supervisor has ended, and then makes the rank save and stop."""
    threading.Thread(target=_end_with, args=(supervisor, rank), name="supervisor-watch", daemon=True).start()


def _end_with(supervisor: ProcessIdentity, rank: int) -> None:
    _wait_for_end(supervisor)
    print(printable(f"rank {rank}: its supervisor (pid {supervisor.pid}) has ended; saving and stopping"), flush=True)
    if not callable(signal.getsignal(signal.SIGTERM)):
        os._exit(EXIT_STOPPED)  # The training has not begun.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(EXIT_CRASH)


def _wait_for_end(supervisor: ProcessIdentity) -> None:
    try:
        descriptor = os.pidfd_open(supervisor.pid)
    except OSError:  # It has ended already, or the kernel is older than 5.3.
        descriptor = -1
    if descriptor >= 0 and is_running(supervisor):  # Otherwise a later process may have got the pid.
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    while is_running(supervisor):
        time.sleep(_POLL_S)
