"""The supervisor's log: one line a decision, and the lock that makes it the only supervisor of its node."""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import MEETING_DIR, supervise_log
from electra_dist.run.strikes import node_name
from electra_dist.store.files import writable


class Log:
    """Lines on stdout and in RUN/supervise-K.log; holds the lock that makes this the only supervisor of this node.

    The lock bears the host's name: a supervisor that lives on behind a cut link holds up nobody on another host.
    """

    def __init__(self, run_dir: Path, node: int) -> None:
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
                f"{lock}: another supervisor of this run is at work on this node; let it end, or stop it with "
                f"`touch {run_dir}/stop`"
            ) from None
        except OSError:  # a file system without locks
            pass

    def __call__(self, text: str) -> None:
        """Say one thing."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(f"supervise: {text}", flush=True)
        try:
            os.write(self._file, f"{now} {text}\n".encode())
        except OSError as error:  # a full disk must not end the watch
            print(f"supervise: the log cannot be written ({error.strerror})", flush=True)
