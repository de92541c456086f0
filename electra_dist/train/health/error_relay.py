"""End all ranks with exit code 78 when one of them alone meets an error that the user must fix.

An example is a damaged shard that only one rank reads; the error class is UserError.

Guarantee: the error is printed once, by the first rank that meets it, and every rank that still reaches the process
group's key-value store ends with exit code 78. Without this module, rank 0 would end with the broken connection that
follows when another rank ends, and the launcher would take whichever exit code it received first.

How: the rank sets a key in that store. The store lives in rank 0's process and does not need the other ranks. If rank
0 itself meets the error, it keeps the store until the other ranks have read the key, for up to `_READ_S` seconds.

Limits: a rank that hangs in a collective that does not notice a missing peer (NCCL) is ended by its launcher.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

from electra_dist.errors import UserError, error_line

# Keys of the process group's store.
_NUM_ERRORS = "user_errors"
_IS_REPORTED = "user_error_reported"
_NUM_INFORMED = "ranks_that_know_of_the_user_error"
_READ_S = 10.0


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


@contextlib.contextmanager
def reporting(error: UserError) -> Iterator[None]:
    """Report an error as `report_once` does. Destroy the process group in the `with` block: other ranks notice that.

    At the end of the block rank 0 waits until every other rank has met an error of its own or has called
    `another_rank_reported`, because the store that they read ends with rank 0's process.
    """
    store = dist.distributed_c10d._get_default_store()
    has_store = dist.get_rank() == 0
    num_ranks = dist.get_world_size()
    report_once(error)
    yield
    deadline = time.monotonic() + _READ_S
    with contextlib.suppress(RuntimeError):
        while has_store and time.monotonic() < deadline:
            if store.add(_NUM_ERRORS, 0) + store.add(_NUM_INFORMED, 0) >= num_ranks:
                break
            time.sleep(0.05)


def another_rank_reported() -> bool:
    """Return whether any rank has reported an error that the user must fix, with `report_once`.

    If so, a collective that fails on this rank fails because that rank has ended, and needs no error message of its
    own. Not collective. The result is False if the store in rank 0's process cannot be reached any more.
    """
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        is_reported = bool(store.check([_IS_REPORTED]))
        if is_reported:
            store.add(_NUM_INFORMED, 1)
        return is_reported
    return False
