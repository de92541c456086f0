"""End all ranks with the same exit code when one of them alone meets an error that ends the run.

Examples are a damaged shard that only one rank reads (UserError, exit code 78), and a disk of one node that stays full
(StorageLost, exit code 75).

Guarantee: the error is printed once, by the first rank that meets one, and every rank that still reaches the process
group's key-value store ends with the exit code of that error. Without this module, rank 0 would end with the broken
connection that follows when another rank ends, and the launcher would take whichever exit code it received first.

How: the rank sets a key in that store. The store lives in rank 0's process and does not need the other ranks.

Limits: NCCL does not notice that a peer is missing. A rank that hangs in NCCL is ended by its launcher.
"""

from __future__ import annotations

import contextlib
import sys

import torch.distributed as dist

from electra_dist.errors import UserError, error_line

# Keys of the process group's store.
_NUM_ERRORS = "user_errors"
_EXIT_CODE = "reported_exit_code"


def report_once(error: UserError, exit_code: int) -> None:
    """Print an error to stderr, unless another rank has printed one, and tell all ranks to end with `exit_code`.

    Any rank may call this while the process group exists. If the group's key-value store, in rank 0's process, cannot
    be reached any more, the error is printed even if another rank has printed one.
    """
    is_first = True  # also if the store cannot be reached
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        num_errors = store.add(_NUM_ERRORS, 1)  # atomic, so exactly one rank gets 1
        is_first = num_errors == 1
        if is_first:
            store.set(_EXIT_CODE, str(exit_code))
    if is_first:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(error_line(error), file=sys.stderr, flush=True)


def reported_exit_code() -> int | None:
    """Return the exit code that came with the first reported error; None without a report or if rank 0 has ended.

    After a report, a collective that fails on this rank is a consequence of the reported error: print nothing for it.
    """
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_EXIT_CODE]):
            return int(store.get(_EXIT_CODE))
    return None
