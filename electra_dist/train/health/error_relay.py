"""A mistake that one rank alone meets inside a run, such as a shard beyond repair, ends all ranks as what it is.

Guarantee: it is printed once, by the first rank that meets it, and every rank that can still tell ends with exit code
78. Without this, rank 0 would end with the broken connection that the other one's end leaves behind, and the launcher
would take whichever code it saw first.

How: the process group's key-value store, which lives in rank 0's process and does not need the others.

Where it stops: a rank that hangs in a collective that does not notice a missing peer (NCCL) is ended by its launcher.
"""

from __future__ import annotations

import contextlib
import sys

import torch.distributed as dist

from electra_dist.errors import UserError

_COUNT, _TOLD = "user_errors", "user_error_told"


def report_once(error: UserError) -> None:
    """Print the error unless another rank was first; the others learn that there was one."""
    is_first = True  # also where rank 0 is gone: better twice than never
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        is_first = store.add(_COUNT, 1) == 1
        store.set(_TOLD, "1")
    if is_first:
        print(f"error: {error}", file=sys.stderr, flush=True)


def another_rank_reported() -> bool:
    """Whether a rank has told a user's mistake: then a broken collective is its echo."""
    with contextlib.suppress(RuntimeError):
        return bool(dist.distributed_c10d._get_default_store().check([_TOLD]))
    return False
