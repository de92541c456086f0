"""Send several requests to a store at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

REQUEST_THREADS = 16  # requests at a time


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call a function for every item, `REQUEST_THREADS` items at a time, and return the results in order.

    A single item is passed in this thread. The first error, in the order of the items, is raised after all calls have
    ended.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(REQUEST_THREADS, len(items))) as pool:
        return list(pool.map(function, items))
