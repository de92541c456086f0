"""Exchange small Python values between all ranks of a run.

Guarantee: every rank returns the same value, or raises the same UserError.

Cost: two small collectives for each call; milliseconds over gloo.

Limits: values are pickled, so these functions are for small values outside the step loop. Every rank of the default
process group must call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from electra_dist.errors import StorageLost, UserError

T = TypeVar("T")


def from_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only and return its value on every rank. Collective.

    Use it for what only one rank may do or must decide for all, such as writing a file.

    Args:
        function: Called without arguments; its value must be picklable.

    Raises:
        UserError, StorageLost: `function` raised it on rank 0; every rank raises a copy. Any other exception is
            raised on rank 0 alone, and the other ranks then wait until the process group fails.
    """
    value: T | None = None
    error: UserError | StorageLost | None = None
    if dist.get_rank() == 0:
        try:
            value = function()
        except (UserError, StorageLost) as known_error:
            error = known_error
    message: list[Any] = [value, error]
    dist.broadcast_object_list(message)  # On the other ranks it replaces the elements of the list.
    value, error = message
    if error is not None:
        raise error
    return value


def gather(value: T) -> list[T]:
    """Return the values of all ranks, ordered by rank, on every rank. Collective.

    No rank returns before all ranks have called it.

    Args:
        value: This rank's value; it must be picklable.
    """
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
