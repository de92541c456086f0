"""Packing keeps every example whole, once, and wastes little."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.corpus.row_packing import make_rows, pack, row_dtype

PAD, CLS = 0, 1


@given(st.integers(3, 60).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=80))))
def test_every_example_lies_in_one_row(case: tuple[int, list[int]]) -> None:
    seq_len, lengths = case
    groups = pack(lengths, seq_len)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in group) for group in groups]
    assert all(0 < total <= seq_len for total in sums)
    assert all(group == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    # What any-fit packing promises: no two rows would fit into one.
    assert all(sums[i] + sums[j] > seq_len for i in range(len(sums)) for j in range(i))


@given(st.lists(st.integers(2, 20), min_size=1, max_size=50), st.sampled_from(["rows", "none"]))
def test_rows_hold_the_examples_and_nothing_else(lengths: list[int], packing: str) -> None:
    examples = [[CLS, *(10 + number for _ in range(length - 1))] for number, length in enumerate(lengths)]
    rows = make_rows(examples, 20, PAD, np.uint16, packing)  # type: ignore[arg-type]
    assert rows.dtype == np.uint16
    assert rows.shape[1] == 20
    found = []
    for row in rows:
        tokens = row[row != PAD]
        assert (row[: len(tokens)] == tokens).all(), "[PAD] before the end"
        starts = np.flatnonzero(tokens == CLS)
        assert starts[0] == 0
        found += [part.tolist() for part in np.split(tokens, starts[1:])]
    assert sorted(found) == sorted(examples)
    if packing == "none":
        assert found == examples
        assert len(rows) == len(examples)


def test_reference_like_lengths_pack_to_one_percent_of_padding() -> None:
    draw = random.Random(0)
    lengths = [512 if draw.random() < 0.8 else draw.randint(3, 512) for _ in range(2000)]
    rows = len(pack(lengths, 512))
    assert 1 - sum(lengths) / (rows * 512) < 0.01


def test_no_examples_make_no_rows() -> None:
    assert make_rows([], 16, PAD, np.uint16, "rows").shape == (0, 16)


def test_ids_take_two_bytes_while_they_fit() -> None:
    assert row_dtype(65_536) is np.uint16
    assert row_dtype(65_537) is np.uint32
