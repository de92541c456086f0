"""Counter-based randomness: every random number of a run is a pure function of what it is for.

Guarantee: a draw depends on (seed, purpose, step, row, position) and on nothing else: not on rank, world size,
batch split, device or how many numbers were drawn before. There is no state to save.

How: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The 64-bit seed is the
key; the counter is (position // 4, row, step, purpose); the four 32-bit outputs belong to four neighbouring
positions. `tl.philox` in Triton gives the same bits, so a kernel and its reference agree draw for draw.

Cost: about 100 integer operations for four numbers. torch has no unsigned 32-bit arithmetic, so 32-bit words ride in
int64; the 64-bit product wraps, and its two's-complement bits are still the right ones. On a CPU a grid is made in
slices shared among threads, by `electra_kernels.native.host` (about 1 ns a number on a core) or, where that was not
built, by NumPy (10 ns).

Where it stops: dropout inside torch's own operators is seeded from here (`derive_seed`), not drawn from here.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from electra_kernels.native import host

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF
NUM_ROUNDS = 10
_CELLS_PER_SLICE = 32768  # counters worked on at a time on a CPU: 256 KB for each of NumPy's temporaries

Fill = Callable[[np.ndarray, int, int, int, np.ndarray, int], None]  # grid, seed, purpose, step, rows, first block


class Purpose(enum.IntEnum):
    """What a random number is for. Values are part of every run's identity: never renumber."""

    SHARD_ORDER = 1
    ROW_ORDER = 2
    MASK_POSITION = 3
    MASK_KEEP = 4
    SAMPLE = 5
    DROPOUT = 6
    INIT = 7
    EVAL = 8
    CORPUS = 9
    HELDOUT = 10
    ATTENTION_DROPOUT = 11


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words for each counter, as int64 (torch) or uint64 (NumPy), of the counters' broadcast shape.

    Args:
        counter: four words (tensor, array or int), each in [0, 2**32). At least one must be a tensor or an array; all
            arrays are torch.int64 or np.uint64.
        seed: 64-bit key.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        # `& _MASK32` also repairs the sign that a shift of a wrapped int64 product drags in.
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return c0, c1, c2, c3


def bits_grid(
    seed: int, purpose: Purpose, step: int, rows: torch.Tensor, num_positions: int, first_position: int = 0
) -> torch.Tensor:
    """32 random bits for each (row, position) with position in [first_position, first_position + num_positions).

    Args:
        rows: [R] int64, row numbers within the global batch (never within the rank), each in [0, 2**32).
        first_position: a multiple of 4.

    Returns:
        [R, num_positions] int64 in [0, 2**32), on the device of `rows`.
    """
    assert first_position % 4 == 0
    num_blocks, first_block = (num_positions + 3) // 4, first_position // 4
    if rows.device.type == "cpu":
        grid = np.empty((rows.numel(), num_blocks * 4), np.int64)
        _fill_in_slices(
            grid, host.fill_bits or _fill_bits, seed, purpose, step, rows.contiguous().numpy(), first_block
        )
        return torch.from_numpy(grid[:, :num_positions])
    blocks = torch.arange(num_blocks, device=rows.device, dtype=torch.int64) + first_block
    # Full tensors from the start: an int left as a scalar would overflow torch's int64 scalar conversion.
    c0 = blocks[None, :].expand(rows.numel(), num_blocks)
    c1 = rows[:, None].expand_as(c0)
    c2 = torch.full_like(c0, step)
    c3 = torch.full_like(c0, int(purpose))
    words = philox4x32((c0, c1, c2, c3), seed)
    return torch.stack(words, dim=-1).reshape(rows.numel(), num_blocks * 4)[:, :num_positions]


def keep_grid(
    seed: int, purpose: Purpose, step: int, rows: torch.Tensor, num_positions: int, first_position: int, drop: float
) -> torch.Tensor:
    """What dropout multiplies with: 0 with probability `drop`, else 1 / (1 - drop); from the bits of `bits_grid`.

    Args:
        num_positions: a multiple of 4.
        drop: in [0, 1).

    Returns:
        fp32 [R, num_positions].
    """
    assert num_positions % 4 == 0
    threshold, scale = drop_threshold(drop), 1.0 / (1.0 - drop)
    if rows.device.type == "cpu" and host.fill_kept:
        grid = np.empty((rows.numel(), num_positions), np.float32)
        fill = functools.partial(host.fill_kept, threshold=threshold, scale=scale)
        _fill_in_slices(grid, fill, seed, purpose, step, rows.contiguous().numpy(), first_position // 4)
        return torch.from_numpy(grid)
    bits = bits_grid(seed, purpose, step, rows, num_positions, first_position)
    return ((bits >= threshold) * scale).float()


def drop_threshold(probability: float) -> int:
    """Bits below this number drop their element."""
    return round(probability * 2**32)


def _fill_in_slices(
    grid: np.ndarray, fill: Fill, seed: int, purpose: Purpose, step: int, rows: np.ndarray, first_block: int
) -> None:
    """Fill [R, 4 * blocks] by rectangles, shared among as many threads as torch uses: `fill` lets go of the
    interpreter while it computes."""
    num_rows, num_blocks = len(rows), grid.shape[1] // 4
    width = max(1, min(num_blocks, _CELLS_PER_SLICE))
    height = _CELLS_PER_SLICE // width
    corners = [(i, j) for i in range(0, num_rows, height) for j in range(0, num_blocks, width)]

    def slice_at(corner: tuple[int, int]) -> None:
        i, j = corner
        fill(grid[i : i + height, 4 * j : 4 * (j + width)], seed, purpose, step, rows[i : i + height], first_block + j)

    host.share(slice_at, corners)


def _fill_bits(grid: np.ndarray, seed: int, purpose: int, step: int, rows: np.ndarray, first_block: int) -> None:
    """`host.fill_bits` in NumPy."""
    c0 = (np.arange(grid.shape[1] // 4, dtype=np.uint64) + np.uint64(first_block))[None, :]
    c1 = rows.astype(np.uint64)[:, None]
    # One-cell arrays, not scalars: words that still depend on one axis only stay small for the first rounds.
    c2, c3 = np.full((1, 1), step, np.uint64), np.full((1, 1), purpose, np.uint64)
    for lane, word in enumerate(philox4x32((c0, c1, c2, c3), seed)):
        grid[:, lane::4] = word


def derive_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A 63-bit seed for a component with a generator of its own, keyed by up to two numbers in [0, 2**32)."""
    a, b = (*numbers, 0, 0)[:2]
    assert len(numbers) <= 2
    words = philox4x32((np.array([0], np.uint64), np.uint64(a), np.uint64(b), np.uint64(int(purpose))), seed)
    return ((int(words[0][0]) << 32) | int(words[1][0])) & (2**63 - 1)
