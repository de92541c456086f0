"""Random bits against published answers, and torch, NumPy and slices against each other, bit for bit."""

import multiprocessing
from unittest import mock

import numpy as np
import pytest
import torch
from electra_kernels import keyed_random
from electra_kernels.keyed_random import Purpose, bits_grid, derive_seed, drop_threshold, keep_grid, philox4x32
from electra_kernels.native import cpu_library
from hypothesis import given, settings
from hypothesis import strategies as st

# Random123, kat_vectors, philox4x32 10: counter, key, answer.
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
def test_known_answers(counter, key, answer):
    seed = key[0] | key[1] << 32
    in_numpy = philox4x32(tuple(np.array([c], np.uint64) for c in counter), seed)
    in_torch = philox4x32(tuple(torch.tensor([c]) for c in counter), seed)
    assert tuple(int(w[0]) for w in in_numpy) == answer
    assert tuple(int(w[0]) for w in in_torch) == answer


@given(seed=SEED, words=st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=9))
@settings(max_examples=50, deadline=None)
def test_torch_and_numpy_agree(seed, words):
    columns = list(zip(*words))
    in_numpy = philox4x32(tuple(np.array(c, np.uint64) for c in columns), seed)
    in_torch = philox4x32(tuple(torch.tensor(c) for c in columns), seed)
    for a, b in zip(in_numpy, in_torch):
        assert a.tolist() == b.tolist()


@given(
    seed=SEED,
    step=WORD,
    rows=st.lists(WORD, max_size=6),
    num_positions=st.integers(0, 70),
    first_block=st.integers(0, 1000),
    cells=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_grid_is_the_definition_for_any_slicing(seed, step, rows, num_positions, first_block, cells):
    whole_slice = keyed_random._CELLS_PER_SLICE
    keyed_random._CELLS_PER_SLICE = cells
    try:
        grid = bits_grid(
            seed, Purpose.EVAL, step, torch.tensor(rows, dtype=torch.int64), num_positions, 4 * first_block
        )
    finally:
        keyed_random._CELLS_PER_SLICE = whole_slice
    assert grid.shape == (len(rows), num_positions)
    assert grid.dtype == torch.int64
    for i, row in enumerate(rows):
        for position in {0, num_positions // 2, num_positions - 1} & set(range(num_positions)):
            counter = (first_block + position // 4, row, step, int(Purpose.EVAL))
            words = philox4x32(tuple(torch.tensor([c]) for c in counter), seed)
            assert int(grid[i, position]) == int(words[position % 4])


def test_a_row_and_a_position_know_nothing_of_their_neighbours():
    rows = torch.tensor([5, 2**32 - 1, 17, 0])
    whole = bits_grid(99, Purpose.SAMPLE, 3, rows, 1000)
    for i, row in enumerate(rows):
        assert torch.equal(bits_grid(99, Purpose.SAMPLE, 3, row[None], 1000)[0], whole[i])
    assert torch.equal(bits_grid(99, Purpose.SAMPLE, 3, rows, 600, first_position=400), whole[:, 400:])


def test_seed_purpose_step_and_row_each_change_the_bits():
    row = torch.tensor([1])
    grids = [
        bits_grid(1, Purpose.SAMPLE, 1, row, 64),
        bits_grid(2, Purpose.SAMPLE, 1, row, 64),
        bits_grid(1 + 2**40, Purpose.SAMPLE, 1, row, 64),
        bits_grid(1, Purpose.DROPOUT, 1, row, 64),
        bits_grid(1, Purpose.SAMPLE, 2, row, 64),
        bits_grid(1, Purpose.SAMPLE, 1, row + 1, 64),
    ]
    for i, a in enumerate(grids):
        for b in grids[:i]:
            assert not (a == b).any()


def test_derived_seeds_differ_and_fit_63_bits():
    seeds = {
        derive_seed(7, purpose, a, b)
        for purpose in (Purpose.INIT, Purpose.DROPOUT)
        for a in range(5)
        for b in range(5)
    }
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_threads_make_the_same_grid_in_a_fork_too() -> None:
    rows, before = torch.arange(40), torch.get_num_threads()
    grids = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            grids.append(bits_grid(7, Purpose.DROPOUT, 3, rows, 5000, 8))
        with multiprocessing.get_context("fork").Pool(1) as pool:
            grids.append(pool.apply_async(bits_grid, (7, Purpose.DROPOUT, 3, rows, 5000, 8)).get(timeout=60))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(grids[0], grids[1]) and torch.equal(grids[0], grids[2])


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
def test_the_library_and_numpy_make_the_same_bits(seed, step, rows, num_blocks, first_block, cells, drop):
    made = []
    for fillers in ((cpu_library.fill_bits, cpu_library.fill_kept), (None, None)):
        patch = dict(zip(("fill_bits", "fill_kept"), fillers))
        with mock.patch.multiple(cpu_library, **patch), mock.patch.object(keyed_random, "_CELLS_PER_SLICE", cells):
            given_ = (seed, Purpose.DROPOUT, step, torch.tensor(rows), 4 * num_blocks, 4 * first_block)
            made.append((bits_grid(*given_), keep_grid(*given_, drop)))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    kept = made[0][0] >= drop_threshold(drop)
    assert torch.equal(made[0][1], torch.where(kept, 1 / (1 - drop), 0.0).float())


@pytest.mark.skipif(cpu_library.fill_bits is None, reason="the package was built without a C compiler")
def test_a_library_of_another_version_is_not_used(monkeypatch):
    assert cpu_library._load() is not None
    monkeypatch.setattr(cpu_library, "_VERSION", 0)
    assert cpu_library._load() is None


def test_rows_may_be_any_view():
    rows = torch.arange(40)[::7]
    assert torch.equal(bits_grid(1, Purpose.EVAL, 2, rows, 64), bits_grid(1, Purpose.EVAL, 2, rows.clone(), 64))
