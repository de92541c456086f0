"""Which ranks are stragglers: those that were slow at every one of the last looks."""

from __future__ import annotations

from electra_dist.analysis.stragglers import stragglers


def test_a_rank_is_a_straggler_only_if_it_was_slow_at_every_one_of_the_last_looks():
    even = [1.0, 1.0, 1.01, 0.99]
    slow_2 = [1.0, 1.0, 1.3, 0.99]
    slow_both = [1.0, 1.5, 1.3, 0.99]
    assert stragglers([even, slow_2, slow_2, slow_2]) == [2]
    assert stragglers([slow_2, slow_2, even, slow_2]) == []
    assert stragglers([slow_2, slow_2]) == []
    assert stragglers([slow_both] * 3, factor=1.1) == [1, 2]
    assert stragglers([slow_2, slow_both], factor=1.1, in_a_row=2) == [2]
    assert stragglers([slow_2] * 3, factor=1.31) == []


def test_two_ranks_can_be_told_apart_below_a_factor_of_two():
    assert stragglers([[1.0, 2.0]] * 3, factor=1.2) == [1]
    assert stragglers([[1.0]] * 3) == []
