"""The row order: it equals a scalar implementation, has the properties of a random permutation, and never changes."""

from __future__ import annotations

import itertools
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from electra_kernels.keyed_random import Purpose
from electra_kernels.native import cpu_library
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, poisson

from electra_dist.data.order import NUM_ROUNDS, CorpusOrder, RowOrder, permute

LARGE = [16_384] * 3_905 + [777]  # 64 M rows

orders = st.builds(
    CorpusOrder,
    rows_per_shard=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    seed=st.integers(0, 2**63 - 1),
    window_shards=st.integers(1, 14),
)


def scalar_philox(counter: list[int], seed: int) -> int:
    """Return the first word of Philox4x32-10, in Python integers, as in the paper (Salmon et al., 2011)."""
    c, k = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0]


def scalar_permute(index: int, size: int, seed: int, purpose: int, epoch: int, block: int) -> int:
    """Return the place of one index, by a scalar implementation of `permute`."""
    a = 1
    while a * a < size:
        a += 1
    b = -(-size // a)
    while True:
        left, right = divmod(index, b)
        for number in range(NUM_ROUNDS):
            half, modulus = (right, a) if number % 2 == 0 else (left, b)
            step = scalar_philox([half, block, epoch, purpose + 256 * number], seed) * modulus // 2**32
            if number % 2 == 0:
                left = (left + step) % a
            else:
                right = (right + step) % b
        index = left * b + right
        if index < size:
            return index


def numbers_permuted(size: int, count: int, seed: int = 3) -> np.ndarray:
    """Return `count` different permutations of [0, size), [count, size]."""
    index = np.tile(np.arange(size), count)
    block = np.repeat(np.arange(count), size)
    places = permute(
        index, np.full(index.size, size), seed=seed, purpose=Purpose.ROW_ORDER, epoch=0 * block, block=block
    )
    return places.astype(np.int64).reshape(count, size)


@given(st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_permutation_equals_the_scalar_implementation(size: int, seed: int, epoch: int, block: int) -> None:
    index = np.arange(size)
    same = np.full(size, size)
    key = {"epoch": np.full(size, epoch), "block": np.full(size, block)}
    places = permute(index, same, seed=seed, purpose=Purpose.SHARD_ORDER, **key)
    assert places.tolist() == [scalar_permute(i, size, seed, 1, epoch, block) for i in range(size)]
    assert sorted(places.tolist()) == list(range(size))


@pytest.mark.skipif(cpu_library.permute is None, reason="the package was built without a C compiler")
@given(
    st.lists(st.tuples(st.integers(1, 2**40), st.floats(0, 1, exclude_max=True)), min_size=1, max_size=40),
    st.integers(0, 2**63 - 1),
)
@settings(max_examples=40, deadline=None)
def test_the_c_library_and_numpy_give_equal_permutations(cells: list[tuple[int, float]], seed: int) -> None:
    size = np.array([size for size, _ in cells])
    index = np.array([int(share * size) for size, share in cells])
    key = {"epoch": np.arange(size.size), "block": size % 97}
    found = permute(index, size, seed=seed, purpose=Purpose.ROW_ORDER, **key)
    with mock.patch.object(cpu_library, "permute", None):
        assert found.tolist() == permute(index, size, seed=seed, purpose=Purpose.ROW_ORDER, **key).tolist()


def test_permutation_of_a_large_window_equals_the_scalar_implementation() -> None:
    size = 64 * 16_384 + 5
    index = np.array([0, 1, 1000, size // 2, size - 1])
    key = {"epoch": np.full(5, 7), "block": np.full(5, 60)}
    places = permute(index, np.full(5, size), seed=9, purpose=Purpose.ROW_ORDER, **key)
    assert places.tolist() == [scalar_permute(int(i), size, 9, 2, 7, 60) for i in index]


def test_the_order_of_existing_runs_never_changes() -> None:
    """If these numbers change, no existing run can be resumed."""
    order = CorpusOrder([3, 5, 1, 7, 2, 9], seed=7, window_shards=2)
    _, shards, rows = order.locate(np.arange(30))
    assert RowOrder([order]).row_ids(shards, rows).tolist() == [
        7,
        15,
        4,
        6,
        10,
        11,
        9,
        3,
        5,
        13,
        14,
        12,
        20,
        22,
        19,
        18,
        21,
        24,
        8,
        26,
        25,
        23,
        0,
        2,
        1,
        16,
        17,
        25,
        8,
        20,
    ]


@given(orders, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(order: CorpusOrder, epoch: int) -> None:
    n = order.rows_per_epoch
    epochs, shards, rows = order.locate(np.arange(epoch * n, (epoch + 1) * n))
    assert set(epochs.tolist()) == {epoch}
    assert sorted(RowOrder([order]).row_ids(shards, rows).tolist()) == list(range(n))


@given(orders, st.data())
@settings(max_examples=60, deadline=None)
def test_locating_a_position_does_not_depend_on_other_positions_or_earlier_calls(
    order: CorpusOrder, data: st.DataObject
) -> None:
    end = 3 * order.rows_per_epoch
    whole = np.stack(order.locate(np.arange(end)))
    wanted = np.array(data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=6)))
    assert (np.stack(order.locate(wanted)) == whole[:, wanted]).all()
    one_by_one = [np.stack(order.locate(wanted[i : i + 1])) for i in range(len(wanted))]
    assert (np.concatenate(one_by_one, 1) == whole[:, wanted]).all()


@given(orders, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_windows_tile_an_epoch_and_hold_exactly_the_rows_of_their_shards(order: CorpusOrder, epoch: int) -> None:
    position, end = epoch * order.rows_per_epoch, (epoch + 1) * order.rows_per_epoch
    seen: list[int] = []
    while position < end:
        window = order.window_at(position)
        assert window.first_position == position
        assert order.window_at(window.end_position - 1).first_position == position
        _, shards, _ = order.locate(np.arange(position, window.end_position))
        assert set(shards.tolist()) == set(window.shards.tolist())
        seen += window.shards.tolist()
        position = window.end_position
    assert position == end
    assert sorted(seen) == list(range(len(seen)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_small_permutations_are_equally_frequent(size: int) -> None:
    """A chi-squared test over all size! permutations; the keys are fixed, so the outcome is deterministic."""
    codes = numbers_permuted(size, 30_000) @ 10 ** np.arange(size)
    all_codes = [np.array(p) @ 10 ** np.arange(size) for p in itertools.permutations(range(size))]
    observed = [(codes == code).sum() for code in all_codes]
    assert chisquare(observed).pvalue > 0.001


def test_a_large_permutation_passes_tests_of_randomness() -> None:
    """Places are uncorrelated with indices and with their neighbours' places; fixed points follow Poisson(1)."""
    size = 100_003
    places = numbers_permuted(size, 1)[0]
    noise = size**-0.5
    assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < 4 * noise
    for lag in (1, 2, 317, 316):  # the Feistel network works on a grid of 317 x 316
        assert abs(np.corrcoef(places[:-lag], places[lag:])[0, 1]) < 4 * noise
    cells = np.histogram2d(np.arange(size), places, bins=(20, 20))[0].ravel()
    assert chisquare(cells).pvalue > 0.001
    fixed = (numbers_permuted(97, 2_000) == np.arange(97)).sum(1)
    observed = np.bincount(np.minimum(fixed, 5), minlength=6)
    expected = [*poisson.pmf(range(5), 1), poisson.sf(4, 1)]
    assert chisquare(observed, np.array(expected) * 2_000).pvalue > 0.001


def test_orders_of_different_epochs_and_seeds_are_unrelated() -> None:
    rows = [500] * 8

    def ids(seed: int, epoch: int) -> np.ndarray:
        order = CorpusOrder(rows, seed, 4)
        _, shards, inside = order.locate(np.arange(epoch * 4_000, (epoch + 1) * 4_000))
        return RowOrder([order]).row_ids(shards, inside)

    for seed, epoch in ((1, 1), (2, 0), (1 + 2**32, 0)):
        assert (ids(1, 0) == ids(seed, epoch)).sum() < 10  # about one is expected by chance


def test_locating_positions_of_64_million_rows_takes_less_than_4_mb() -> None:
    """The explicit order of one epoch would take 512 MB."""
    order = CorpusOrder(LARGE, seed=1, window_shards=64)
    tracemalloc.start()
    for position in (0, 12_345_678, 63_999_999, 10 * order.rows_per_epoch + 5, 10**12):
        order.locate(np.arange(position, position + 2_048))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6
