"""Detection of stragglers: ranks that were slower than the median rank in each of the last looks.

A look is one gathering of the step times of all ranks, in seconds.
"""

from __future__ import annotations

from electra_dist.analysis.stragglers import stragglers


def test_a_rank_is_a_straggler_only_if_it_was_slow_in_each_of_the_last_looks():
    """By default a rank must take more than 1.2 times the median in three looks. The slowest rank comes first."""
    no_rank_slow = [1.0, 1.0, 1.01, 0.99]
    rank_2_slow = [1.0, 1.0, 1.3, 0.99]
    ranks_1_and_2_slow = [1.0, 1.5, 1.3, 0.99]

    assert stragglers([no_rank_slow, rank_2_slow, rank_2_slow, rank_2_slow]) == [2]
    assert stragglers([rank_2_slow, rank_2_slow, no_rank_slow, rank_2_slow]) == []
    assert stragglers([rank_2_slow, rank_2_slow]) == [], "two looks are too few"
    assert stragglers([ranks_1_and_2_slow] * 3, factor=1.1) == [1, 2]
    assert stragglers([rank_2_slow, ranks_1_and_2_slow], factor=1.1, in_a_row=2) == [2]
    assert stragglers([rank_2_slow] * 3, factor=1.31) == []


def test_of_two_ranks_the_slower_is_a_straggler_if_the_factor_is_below_two():
    """The median of two ranks is their mean, so no rank can exceed twice the median. A single rank is never slow."""
    assert stragglers([[1.0, 2.0]] * 3, factor=1.2) == [1]
    assert stragglers([[1.0]] * 3) == []
