"""Exchange small Python values between all ranks of a run.

Guarantee: every rank returns the same value, or raises the same UserError.

Cost: two small collectives for each call; milliseconds over gloo.

Limits: values are pickled, so these functions are for small values outside the step loop. Every rank of the default
process group must call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from electra_dist.errors import UserError

T = TypeVar("T")


def from_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only and return its value on every rank. Collective.

    Args:
        function: Called without arguments; its value must be picklable.

    Raises:
        UserError: `function` raised it on rank 0; every rank raises an error of the same type. Any other exception is
            raised on rank 0 alone, and the other ranks then wait until the process group fails.
    """
    outcome: list[tuple[T | None, UserError | None]] = [(None, None)]  # broadcast_object_list fills a list in place.
    if dist.get_rank() == 0:
        try:
            outcome = [(function(), None)]
        except UserError as error:
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome)
    value, error_of_rank_0 = outcome[0]
    if error_of_rank_0 is not None:
        raise error_of_rank_0
    return value  # type: ignore[return-value]  # Without an error, rank 0 has set it.


def gather(value: T) -> list[T]:
    """Return the values of all ranks, ordered by rank, on every rank. Collective.

    Args:
        value: This rank's value; it must be picklable.
    """
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
