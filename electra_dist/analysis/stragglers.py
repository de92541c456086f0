"""Find stragglers, the ranks that are repeatedly slower than the median rank, from gathered step times.

The step times of all ranks are gathered at intervals; each gathering is called a look. One slow shard, garbage
collection or checkpoint is not enough.

Limits: all ranks take as long as the slowest, so gather the time of a rank's own work (from the end of the data wait
to just before the first collective). With two ranks the median is the mean of both: the factor must be below 2.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def stragglers(looks: Sequence[Sequence[float]], *, factor: float = 1.2, in_a_row: int = 3) -> list[int]:
    """Return the ranks that took more than `factor` times the median time in each of the last `in_a_row` looks.
    A look has the step seconds of all ranks; the newest look is the last one. The result begins with the slowest rank
    and is [] if there are too few looks.
    """
    last_looks = looks[-in_a_row:]
    if len(last_looks) < in_a_row:
        return []
    num_ranks = len(last_looks[0])
    always_slow = set(range(num_ranks))  # ranks that were slow in each look so far
    for times in last_looks:
        assert len(times) == num_ranks, "looks differ in their number of ranks; pass one time per rank"
        limit_s = factor * statistics.median(times)
        always_slow &= {rank for rank, seconds in enumerate(times) if seconds > limit_s}
    newest_times = last_looks[-1]
    return sorted(always_slow, key=lambda rank: -newest_times[rank])  # slowest first
