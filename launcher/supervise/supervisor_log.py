"""Write the supervisor's log, and hold the lock that prevents a second supervisor of the same run on a node."""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import MEETING_DIR, supervise_log
from electra_dist.run.node_strikes import node_name
from electra_dist.store.atomic_files import writable


class Log:
    """Log of one supervisor, which also holds the lock that makes it the only one of its run on this host.

    Call the object with a text to write one line to stdout and to RUN/supervise-K.log, where K is the node's number.
    The name of the lock file contains the host name. A supervisor that is cut off from the network therefore does not
    block the supervisor that takes over its node number on another host. The kernel releases the lock when the process
    ends, also after a kill.
    """

    def __init__(self, run_dir: Path, node: int) -> None:
        """Open the log for appending and take the lock; on a file system without locks, go on without one.

        Raises:
            StoreError: the run folder cannot be written.
            UserError: another supervisor of this run holds the lock on this host.
        """
        path = supervise_log(run_dir, node)
        lock = run_dir / MEETING_DIR / f"node-{node}-{node_name()}.lock"
        with writable(path):
            lock.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._lock = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{lock}: another supervisor of this run is active on this node; wait until it ends, or stop it with "
                f"`touch {run_dir}/stop`"
            ) from None
        except OSError:  # The file system has no locks.
            pass

    def __call__(self, text: str) -> None:
        """Write one line to stdout and, with a UTC time in front, to the log file. Never raises on a full disk."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(f"supervise: {text}", flush=True)
        try:
            os.write(self._file, f"{now} {text}\n".encode())
        except OSError as error:  # The supervisor must keep watching its ranks when the disk is full.
            print(
                f"supervise: the log file cannot be written ({error.strerror}); free space in the run folder",
                flush=True,
            )
