"""Random bits against published answers, and torch, NumPy and slices against each other, bit for bit."""

import itertools
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from electra_kernels import keyed_random
from electra_kernels.keyed_random import (
    Purpose,
    bits_grid,
    derive_seed,
    device_keys,
    drop_threshold,
    keep_grid,
    philox4x32,
)
from electra_kernels.native import cpu_library
from hypothesis import given, settings
from hypothesis import strategies as st

# Counter, key and answer of philox4x32 with 10 rounds, from kat_vectors of the Random123 library.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers_in_numpy_and_torch(counter, key, answer):
    low_word, high_word = key
    seed = low_word | high_word << 32

    in_numpy = philox4x32(tuple(np.array([c], np.uint64) for c in counter), seed)
    in_torch = philox4x32(tuple(torch.tensor([c]) for c in counter), seed)

    assert tuple(int(w[0]) for w in in_numpy) == answer
    assert tuple(int(w[0]) for w in in_torch) == answer


@given(seed=SEED, words=st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=9))
@settings(max_examples=50, deadline=None)
def test_philox_in_torch_equals_philox_in_numpy(seed, words):
    columns = list(zip(*words))

    in_numpy = philox4x32(tuple(np.array(c, np.uint64) for c in columns), seed)
    in_torch = philox4x32(tuple(torch.tensor(c) for c in columns), seed)

    for numpy_word, torch_word in zip(in_numpy, in_torch):
        assert numpy_word.tolist() == torch_word.tolist()


@given(
    seed=SEED,
    step=WORD,
    rows=st.lists(WORD, max_size=6),
    num_positions=st.integers(0, 70),
    first_block=st.integers(0, 1000),
    cells=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_grid_cells_are_philox_words_however_the_grid_is_sliced(seed, step, rows, num_positions, first_block, cells):
    """Philox makes four words, a block, for four successive positions. Checked are first, middle and last position."""
    row_tensor = torch.tensor(rows, dtype=torch.int64)

    with mock.patch.object(keyed_random, "_CELLS_PER_SLICE", cells):
        grid = bits_grid(seed, Purpose.EVAL, step, row_tensor, num_positions, 4 * first_block)

    assert grid.shape == (len(rows), num_positions)
    assert grid.dtype == torch.int64
    checked_positions = {0, num_positions // 2, num_positions - 1} & set(range(num_positions))
    for i, row in enumerate(rows):
        for position in checked_positions:
            counter = (first_block + position // 4, row, step, int(Purpose.EVAL))
            words = philox4x32(tuple(torch.tensor([c]) for c in counter), seed)
            assert int(grid[i, position]) == int(words[position % 4])


def test_bits_of_a_row_and_position_do_not_depend_on_other_rows_and_positions():
    rows = torch.tensor([5, 2**32 - 1, 17, 0])
    whole = bits_grid(99, Purpose.SAMPLE, 3, rows, 1000)
    for i, row in enumerate(rows):
        assert torch.equal(bits_grid(99, Purpose.SAMPLE, 3, row[None], 1000)[0], whole[i])
    assert torch.equal(bits_grid(99, Purpose.SAMPLE, 3, rows, 600, first_position=400), whole[:, 400:])


def test_another_seed_purpose_step_or_row_changes_every_word():
    row = torch.tensor([1])
    grids = [
        bits_grid(1, Purpose.SAMPLE, 1, row, 64),
        bits_grid(2, Purpose.SAMPLE, 1, row, 64),
        bits_grid(1 + 2**40, Purpose.SAMPLE, 1, row, 64),
        bits_grid(1, Purpose.DROPOUT, 1, row, 64),
        bits_grid(1, Purpose.SAMPLE, 2, row, 64),
        bits_grid(1, Purpose.SAMPLE, 1, row + 1, 64),
    ]
    for i, grid in enumerate(grids):
        for earlier_grid in grids[:i]:
            assert not (grid == earlier_grid).any()


def test_derived_seeds_differ_and_fit_63_bits():
    arguments = itertools.product((Purpose.INIT, Purpose.DROPOUT), range(5), range(5))

    seeds = {derive_seed(7, purpose, first, second) for purpose, first, second in arguments}

    assert len(seeds) == 2 * 5 * 5
    for seed in seeds:
        assert 0 <= seed < 2**63


_GRIDS_BY_THREADS_AND_BY_A_FORK = """
import multiprocessing
import torch
from electra_kernels.keyed_random import Purpose, bits_grid

arguments = (7, Purpose.DROPOUT, 3, torch.arange(40), 5000, 8)
torch.set_num_threads(1)
by_one_thread = bits_grid(*arguments)
torch.set_num_threads(2)
by_two_threads = bits_grid(*arguments)
with multiprocessing.get_context("fork").Pool(1) as pool:
    by_fork = pool.apply_async(bits_grid, arguments).get(timeout=60)
assert torch.equal(by_one_thread, by_two_threads)
assert torch.equal(by_one_thread, by_fork)
"""


def test_one_thread_two_threads_and_a_forked_process_make_the_same_grid() -> None:
    """A fork does not inherit threads, so one that waits for its parent's would hang: hence the timeout.

    It runs in a process of its own, because torch's OpenMP may hang in the fork of a process where autograd ran.
    """
    command = [sys.executable, "-c", _GRIDS_BY_THREADS_AND_BY_A_FORK]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(cpu_library.fill_bits is None, reason="the package was built without a C compiler")
@given(
    seed=SEED,
    step=WORD,
    rows=st.lists(WORD, min_size=1, max_size=5),
    num_blocks=st.integers(1, 40),
    first_block=st.integers(0, 2**31),
    cells=st.integers(1, 60),
    drop=st.floats(0, 0.999),
)
@settings(max_examples=60, deadline=None)
def test_the_c_library_makes_the_bits_and_dropout_factors_of_numpy(
    seed, step, rows, num_blocks, first_block, cells, drop
):
    arguments = (seed, Purpose.DROPOUT, step, torch.tensor(rows), 4 * num_blocks, 4 * first_block)

    with mock.patch.object(keyed_random, "_CELLS_PER_SLICE", cells):
        library_bits = bits_grid(*arguments)
        library_factors = keep_grid(*arguments, drop)
        with mock.patch.multiple(cpu_library, fill_bits=None, fill_kept=None):
            numpy_bits = bits_grid(*arguments)
            numpy_factors = keep_grid(*arguments, drop)

    assert torch.equal(library_bits, numpy_bits)
    assert torch.equal(library_factors, numpy_factors)
    is_kept = library_bits >= drop_threshold(drop)
    assert torch.equal(library_factors, torch.where(is_kept, 1 / (1 - drop), 0.0).float())


@pytest.mark.skipif(cpu_library.fill_bits is None, reason="the package was built without a C compiler")
def test_a_library_of_another_version_is_not_used(monkeypatch):
    assert cpu_library._load() is not None
    monkeypatch.setattr(cpu_library, "_VERSION", 0)
    assert cpu_library._load() is None


def test_row_numbers_in_a_strided_view_give_the_grid_of_a_contiguous_copy():
    strided_rows = torch.arange(40)[::7]

    grid = bits_grid(1, Purpose.EVAL, 2, strided_rows, 64)

    assert torch.equal(grid, bits_grid(1, Purpose.EVAL, 2, strided_rows.clone(), 64))


def test_the_keys_of_each_layer_begin_at_a_multiple_of_16_bytes():
    """Triton compiles a kernel once for pointers at such multiples, and once more for others."""
    key_L3 = device_keys(7, 3, torch.device("cpu"), 5)
    assert key_L3.tolist() == [[7, 3, layer] for layer in range(5)]
    assert [key_3.data_ptr() % 16 for key_3 in key_L3.unbind(0)] == [0] * 5
    assert all(key_3.is_contiguous() for key_3 in key_L3.unbind(0))
