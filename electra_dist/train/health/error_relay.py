"""End all ranks with exit code 78 when one of them alone meets an error that the user must fix.

An example is a damaged shard that only one rank reads; the error class is UserError.

Guarantee: the error is printed once, by the first rank that meets it, and every rank that still reaches the process
group's key-value store ends with exit code 78. Without this module, rank 0 would end with the broken connection that
follows when another rank ends, and the launcher would take whichever exit code it received first.

How: the rank sets a key in that store. The store lives in rank 0's process and does not need the other ranks.

Limits: a rank that hangs in a collective that does not notice a missing peer (NCCL) is ended by its launcher.
"""

from __future__ import annotations

import contextlib
import sys

import torch.distributed as dist

from electra_dist.errors import UserError, error_line

# Keys of the process group's store.
_NUM_ERRORS = "user_errors"
_IS_REPORTED = "user_error_reported"


def report_once(error: UserError) -> None:
    """Print an error that the user must fix, unless another rank has printed one, and inform the other ranks.

    It is printed to stderr. The other ranks find out by `another_rank_reported`.

    Not collective; any rank may call it at any time while the process group exists. If the store in rank 0's process
    cannot be reached any more, the error is printed all the same: printing it twice is better than not at all.

    Args:
        error: its text is printed after "error: ".
    """
    is_first = True  # also if the store cannot be reached
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        num_errors = store.add(_NUM_ERRORS, 1)  # atomic, so exactly one rank gets 1
        is_first = num_errors == 1
        store.set(_IS_REPORTED, "1")
    if is_first:
        print(error_line(error), file=sys.stderr, flush=True)


def another_rank_reported() -> bool:
    """Return whether any rank has reported an error that the user must fix, with `report_once`.

    If so, a collective that fails on this rank fails because that rank has ended, and needs no error message of its
    own. Not collective. The result is False if the store in rank 0's process cannot be reached any more.
    """
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        return bool(store.check([_IS_REPORTED]))
    return False
