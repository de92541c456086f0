"""The receipt of a set of rows: it does not depend on their order, and differs for different rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.data.receipt import Receipt, row_hash

Rows = st.lists(st.integers(0, 2**40), max_size=30)


def of(rows: list[int]) -> Receipt:
    """Return the receipt of some row ids."""
    return Receipt.of(np.array(rows, np.int64))


@given(Rows, st.randoms(use_true_random=False), st.integers(0, 30))
def test_any_order_and_any_split_of_rows_gives_the_same_receipt(rows: list[int], random: object, cut: int) -> None:
    shuffled = sorted(rows, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert of(shuffled[:cut]) + of(shuffled[cut:]) == of(rows)
    assert of(rows) - of(shuffled[:cut]) == of(shuffled[cut:])
    assert of(rows).times(3) == of(rows * 3)


@given(Rows, Rows)
def test_receipts_are_equal_only_for_equal_multisets(a: list[int], b: list[int]) -> None:
    assert (of(a) == of(b)) == (Counter(a) == Counter(b))


@given(Rows)
def test_words_can_be_summed_as_int64_that_wraps_around(rows: list[int]) -> None:
    with np.errstate(over="ignore"):
        total = np.sum([np.array(of([row]).words, np.int64) for row in rows], axis=0, dtype=np.int64)
    words = total.tolist() if rows else (0, 0)
    assert Receipt.from_words(*words) == of(rows)


def test_no_two_of_a_million_rows_share_a_hash() -> None:
    assert len(np.unique(row_hash(np.arange(1_000_000)))) == 1_000_000
