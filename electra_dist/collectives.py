"""Collective operations on Python values: a decision of rank 0 for all ranks, and everyone's value for everyone.

Guarantee: every rank returns the same value, or raises the same UserError. They pickle what they send, so they are for
small values outside the step loop.

Cost: two small collectives each; milliseconds over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from electra_dist.errors import UserError

T = TypeVar("T")


def from_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and return its value on every rank. Collective.

    Raises:
        UserError: what `function` raised on rank 0, on every rank and of the same type. Other exceptions are rank 0's
            alone.
    """
    box: list[tuple[T | None, UserError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            box = [(function(), None)]
        except UserError as error:
            box = [(None, error)]
    dist.broadcast_object_list(box)
    value, mistake = box[0]
    if mistake is not None:
        raise mistake
    return value  # type: ignore[return-value]  # rank 0 filled it


def gather(value: T) -> list[T]:
    """Return the values of all ranks, by rank. Collective."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
