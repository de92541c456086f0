"""Which ranks are slow: pure, from the step times that rank 0 gathered.

Guarantee: a rank is named only if it was slower than the median rank by the factor in every one of the last looks, so
one slow shard, one garbage collection or one checkpoint names nobody.

Cost: one sort of W numbers a look.

Where it stops: at synchronous training all ranks take as long as the slowest. Gather the time of a rank's own work
(from the end of the data wait to just before the first collective), not the time between steps. With two ranks the
median is the mean of both: the factor must then be below 2 for either to be named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def stragglers(looks: Sequence[Sequence[float]], *, factor: float = 1.2, in_a_row: int = 3) -> list[int]:
    """Ranks slower than `factor` times the median in each of the last `in_a_row` looks, the slowest first.

    Args:
        looks: step times [W] in seconds, one sequence a look, newest last. Fewer than `in_a_row` name nobody.
    """
    last = looks[-in_a_row:]
    if len(last) < in_a_row:
        return []
    slow = set(range(len(last[0])))
    for times in last:
        assert len(times) == len(last[0]), "one look has another number of ranks"
        median = statistics.median(times)
        slow &= {rank for rank, seconds in enumerate(times) if seconds > factor * median}
    return sorted(slow, key=lambda rank: -last[-1][rank])
