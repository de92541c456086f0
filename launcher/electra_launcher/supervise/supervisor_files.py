"""The two files of a node's supervisor: its log, and the lock by which a run has only one supervisor on a node."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.escapes import printable
from electra_dist.run.folder import MEETING_DIR, supervise_log
from electra_dist.run.processes import node_name
from electra_dist.store.atomic_files import lock_file, writable


class Log:
    """Log of one supervisor. Calling the object with a text writes the text to stdout and RUN/supervise-NODE.log."""

    def __init__(self, run_dir: Path, node: int) -> None:
        path = supervise_log(run_dir, node)
        with writable(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def __call__(self, text: str) -> None:
        """Write a line to stdout and, with the UTC time in front, to the log file. A full disk raises no exception."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(printable(f"supervise: {text}"), flush=True)
        try:
            os.write(self._file, f"{now} {printable(text)}\n".encode())
        except OSError as error:  # The supervisor must keep watching its ranks when the disk is full.
            print(
                printable(
                    f"supervise: the log file cannot be written ({error.strerror}); free space in the run folder"
                ),
                flush=True,
            )


def lock_node(run_dir: Path, node: int) -> int:
    """Take the lock that prevents a second supervisor of this run and node number on this host; UserError if taken.

    On node 0, the lease of the run folder does this. Returns the descriptor of the lock file. Keep it open: the kernel
    releases the lock when it is closed, or when this process ends in any way. On a file system without locks nothing
    is locked.
    """
    # The host name is in the file's name, so that a supervisor that is cut off from the network does not block the one
    # that takes over its node number on another host.
    path = run_dir / MEETING_DIR / f"node-{node}-{node_name()}.lock"
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        lock_file(descriptor, wait=False)
    except BlockingIOError:
        raise UserError(
            f"{path}: another supervisor of this run is active on this node; wait until it ends, or stop it with "
            f"`touch {run_dir}/stop`"
        ) from None
    return descriptor
