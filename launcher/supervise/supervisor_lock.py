"""Lock a node, so that a run has only one supervisor there. On node 0, the lease of the run folder does this."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import MEETING_DIR
from electra_dist.run.processes import node_name
from electra_dist.store.atomic_files import writable


def lock_node(run_dir: Path, node: int) -> int:
    """Take the lock that prevents a second supervisor of this run and node number on this host; UserError if taken.

    Returns the descriptor of the lock file. Keep this descriptor open: the kernel releases the lock when it is closed,
    or when this process ends in any way. On a file system without locks nothing is locked.
    """
    # The host name is in the file's name, so that a supervisor that is cut off from the network does not block the one
    # that takes over its node number on another host.
    path = run_dir / MEETING_DIR / f"node-{node}-{node_name()}.lock"
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{path}: another supervisor of this run is active on this node; wait until it ends, or stop it with "
            f"`touch {run_dir}/stop`"
        ) from None
    except OSError:  # The file system has no locks.
        pass
    return descriptor
