"""Packing of examples into rows: every example is whole and in one row, and few places of the rows are padding."""

from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.corpus.builder.examples import make_rows, pack, row_dtype

PAD = 0
CLS = 1


@st.composite
def row_length_and_example_lengths(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A row length of 3 to 60 tokens, and the lengths of up to 80 examples that fit such a row."""
    seq_len = draw(st.integers(3, 60))
    example_lengths = draw(st.lists(st.integers(1, seq_len), max_size=80))
    return seq_len, example_lengths


@given(row_length_and_example_lengths())
def test_every_example_is_put_into_one_row_and_no_two_rows_would_fit_into_one(case: tuple[int, list[int]]) -> None:
    """That no two rows would fit into one holds for every any-fit packing; it bounds the padding."""
    seq_len, example_lengths = case

    rows = pack(example_lengths, seq_len)  # each row is the list of its examples, by their numbers

    packed_examples = sorted(itertools.chain.from_iterable(rows))
    assert packed_examples == list(range(len(example_lengths)))
    for row in rows:
        assert row == sorted(row), "the examples of a row are not in their order"
    first_examples = [row[0] for row in rows]
    assert first_examples == sorted(first_examples), "the rows are not in the order of their first examples"
    row_lengths = [sum(example_lengths[example] for example in row) for row in rows]
    for row_length in row_lengths:
        assert 0 < row_length <= seq_len
    for row_length, other_length in itertools.combinations(row_lengths, 2):
        assert row_length + other_length > seq_len


@given(st.lists(st.integers(2, 20), min_size=1, max_size=50), st.sampled_from(["rows", "none"]))
def test_rows_hold_all_examples_and_only_them_with_padding_at_the_end(lengths: list[int], packing: str) -> None:
    """An example is [CLS] and then a number of its own, so that two examples cannot be confused."""
    seq_len = 20
    examples = [[CLS] + [10 + number] * (length - 1) for number, length in enumerate(lengths)]

    rows, _ = make_rows(examples, seq_len, PAD, np.uint16, packing)  # type: ignore[arg-type]

    assert rows.dtype == np.uint16
    assert rows.shape[1] == seq_len
    examples_of_rows = []
    for row in rows:
        tokens = row[row != PAD]
        assert (row[: len(tokens)] == tokens).all(), "[PAD] before the end"
        starts = np.flatnonzero(tokens == CLS)
        assert starts[0] == 0
        examples_of_rows += [example.tolist() for example in np.split(tokens, starts[1:])]
    assert sorted(examples_of_rows) == sorted(examples)
    if packing == "none":
        assert examples_of_rows == examples
        assert len(rows) == len(examples)


def test_less_than_one_percent_is_padding_if_four_examples_in_five_are_full() -> None:
    """The lengths resemble those of ELECTRA's examples: 80 % fill a row of 512, the others are uniform in 3 to 512."""
    seq_len = 512
    draw = random.Random(0)
    lengths = [seq_len if draw.random() < 0.8 else draw.randint(3, seq_len) for _ in range(2000)]

    num_rows = len(pack(lengths, seq_len))

    padding = 1 - sum(lengths) / (num_rows * seq_len)
    assert padding < 0.01


def test_no_examples_make_no_rows() -> None:
    rows, places = make_rows([], 16, PAD, np.uint16, "rows")
    assert rows.shape == (0, 16)
    assert places.shape == (0, 3)


def test_ids_take_two_bytes_up_to_65536_entries_and_then_four() -> None:
    assert row_dtype(65_536) is np.uint16
    assert row_dtype(65_537) is np.uint32
