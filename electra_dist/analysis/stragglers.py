"""Straggler detection: which ranks are slow, as a pure function of the step times that rank 0 gathered.

Guarantee: a rank is named only if it was slower than the median rank by the factor in every one of the last looks, so
a single slow shard, garbage collection or checkpoint names no rank. A look is one gathering of all ranks' times.

Cost: one sort of W numbers a look at W ranks.

Limits: in synchronous training all ranks take as long as the slowest. Gather the time of a rank's own work (from the
end of the data wait to just before the first collective), not the time between steps. With two ranks the median is the
mean of both: the factor must then be below 2 for either to be named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def stragglers(looks: Sequence[Sequence[float]], *, factor: float = 1.2, in_a_row: int = 3) -> list[int]:
    """Return the ranks slower than `factor` times the median rank in each of the last looks, the slowest first.

    Args:
        looks: one sequence of times for each look, the newest last: seconds of the rank's own work in a step, [W].
        factor: above 1.
        in_a_row: looks in which a rank must be slow. With fewer looks than that the result is empty.
    """
    last_looks = looks[-in_a_row:]
    if len(last_looks) < in_a_row:
        return []
    slow = set(range(len(last_looks[0])))
    for times in last_looks:
        assert len(times) == len(last_looks[0]), "a look has another number of ranks than the first one"
        median = statistics.median(times)
        slow &= {rank for rank, seconds in enumerate(times) if seconds > factor * median}
    newest_times = last_looks[-1]
    return sorted(slow, key=lambda rank: -newest_times[rank])
