"""Draw random numbers that are pure functions of (seed, purpose, step, row, position), by a counter-based generator.

Guarantee: the purpose is a number for what a draw is used for (`Purpose`). A draw does not depend on rank, world size,
batch split, device or the count of earlier draws. There is no state to save.

How: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The 64-bit seed is the key;
the counter is (position // 4, row, step, purpose); the four 32-bit outputs are the numbers of four neighbouring
positions. `tl.philox` in Triton gives the same bits, so a kernel and its plain-PyTorch reference draw equal numbers.

Cost: about 100 integer operations for four numbers. torch has no unsigned 32-bit arithmetic, so 32-bit words are held
in int64; the 64-bit product wraps, and its two's-complement bits are still correct. On a CPU, an array of numbers is
split into rectangles that several threads fill, by the C library (`native/cpu_library.py`, about 1 ns a number on a
core) or, where that was not built, by NumPy (10 ns).

Limits: dropout inside torch's attention on a GPU takes only its seed from this module (`derive_seed`), not its bits.
Only functions that make tensors import torch, because commands and workers that build or check corpora do without it.

Arguments of all functions: the seed is that of the run or one that `derive_seed` returned, 64 bits. The step is the
global step, in [0, 2**32). Rows are int64 [R], numbers within the global batch (never within the rank), in [0, 2**32).
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from electra_kernels.native import cpu_library

if TYPE_CHECKING:
    import torch

# Constants of Philox4x32.
_MULTIPLIER0 = 0xD2511F53
_MULTIPLIER1 = 0xCD9E8D57
_KEY_INCREMENT0 = 0x9E3779B9
_KEY_INCREMENT1 = 0xBB67AE85
NUM_ROUNDS = 10
_MASK32 = 0xFFFFFFFF
_CELLS_PER_SLICE = 32768  # counters of one slice on a CPU: 256 KB for each of NumPy's temporaries

Fill = Callable[[np.ndarray, int, int, int, np.ndarray, int], None]  # grid, seed, purpose, step, rows, first block


class Purpose(enum.IntEnum):
    """Uses of random numbers; the value is one of the generator's inputs, so that no two uses share random bits.

    Every draw of every run depends on these values. Never renumber them; add new ones at the end.
    """

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
    RANDOM_SHARE = 12
    RANDOM_TOKEN = 13
    EMBEDDING_DROPOUT = 14


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Return four random 32-bit words for each counter: the Philox4x32-10 function of Salmon et al. (SC 2011).

    It works like a block cipher: the 64-bit key (two words) mixes the 128-bit counter (four words) in ten rounds. A
    round multiplies two of the words by constants and distributes the halves of the 64-bit products; the key is
    incremented by constants after each round.

    The words of the counter are in [0, 2**32): int64 tensors, uint64 arrays or integers, at least one of them a tensor
    or an array. The results have the broadcast shape of the words, in int64 or uint64.
    """
    word0, word1, word2, word3 = counter
    key0 = seed & _MASK32
    key1 = (seed >> 32) & _MASK32
    for _ in range(NUM_ROUNDS):
        product0 = word0 * _MULTIPLIER0
        product1 = word2 * _MULTIPLIER1
        # `& _MASK32` also removes the sign bits that the shift of a wrapped int64 product brings in.
        word0 = ((product1 >> 32) & _MASK32) ^ word1 ^ key0
        word1 = product1 & _MASK32
        word2 = ((product0 >> 32) & _MASK32) ^ word3 ^ key1
        word3 = product0 & _MASK32
        key0 = (key0 + _KEY_INCREMENT0) & _MASK32
        key1 = (key1 + _KEY_INCREMENT1) & _MASK32
    return word0, word1, word2, word3


def bits_grid(
    seed: int,
    purpose: Purpose,
    step: int,
    rows: torch.Tensor,
    num_positions: int,
    first_position: int = 0,
) -> torch.Tensor:
    """Return 32 random bits for each row and position, [R, num_positions] int64 in [0, 2**32), on the rows' device.

    The bits are a function of seed, purpose, step, row number and position. `rows` are the R row numbers within the
    global batch. Positions are counted from `first_position`, a multiple of 4.
    """
    import torch

    assert first_position % 4 == 0, f"the first position is {first_position}: pass a multiple of 4"
    num_rows = rows.numel()
    num_blocks = (num_positions + 3) // 4
    first_block = first_position // 4
    if rows.device.type == "cpu":
        grid = np.empty((num_rows, num_blocks * 4), np.int64)
        fill = _fill_bits if cpu_library.fill_bits is None else cpu_library.fill_bits
        rows_array = rows.contiguous().numpy()
        _fill_in_slices(grid, fill, seed, purpose, step, rows_array, first_block, torch.get_num_threads())
        return torch.from_numpy(grid[:, :num_positions])
    blocks = torch.arange(first_block, first_block + num_blocks, device=rows.device)
    # All four words are tensors: the product of a plain integer word would overflow torch's int64 scalar conversion.
    block_word = blocks[None, :].expand(num_rows, num_blocks)
    row_word = rows[:, None].expand_as(block_word)
    step_word = _step_in_row(step, rows.device)[1].expand_as(block_word)
    purpose_word = torch.full_like(block_word, int(purpose))
    words = philox4x32((block_word, row_word, step_word, purpose_word), seed)
    # The four words of a block are the bits of its four positions, next to each other.
    bits = torch.stack(words, dim=-1).reshape(num_rows, num_blocks * 4)
    return bits[:, :num_positions]


def keep_grid(
    seed: int, purpose: Purpose, step: int, rows: torch.Tensor, num_positions: int, first_position: int, drop: float
) -> torch.Tensor:
    """Return the factors of dropout for each row and position, fp32 [R, num_positions], on the rows' device.

    A factor is 0 with probability `drop`, in [0, 1): where the bits that `bits_grid` returns for the same arguments
    are below drop * 2**32. All others are 1 / (1 - drop). `num_positions` and `first_position` are multiples of 4.
    """
    import torch

    assert num_positions % 4 == 0, f"the number of positions is {num_positions}: pass a multiple of 4"
    threshold = drop_threshold(drop)
    scale = 1.0 / (1.0 - drop)
    if rows.device.type == "cpu" and cpu_library.fill_kept is not None:
        # The C function compares and scales while it draws, without an array of bits.
        factors = np.empty((rows.numel(), num_positions), np.float32)
        fill = functools.partial(cpu_library.fill_kept, threshold=threshold, scale=scale)
        rows_array = rows.contiguous().numpy()
        _fill_in_slices(factors, fill, seed, purpose, step, rows_array, first_position // 4, torch.get_num_threads())
        return torch.from_numpy(factors)
    bits = bits_grid(seed, purpose, step, rows, num_positions, first_position)
    is_kept = bits >= threshold
    return (is_kept * scale).float()


@functools.lru_cache(maxsize=16)
def device_keys(seed: int, step: int, device: torch.device, num_layers: int = 1) -> torch.Tensor:
    """Return seed, step and number of each layer, int64 [num_layers, 3], on the device where kernels read them.

    The three numbers of a layer begin at a multiple of 16 bytes, so that Triton compiles a kernel once for all layers.
    The result is cached, so the caller must not change it. For a new step, only the step is copied to the device.
    """
    return (_numbered_seed(seed, device, num_layers) + _step_in_row(step, device))[:, :3]


@functools.lru_cache(maxsize=256)
def _numbered_seed(seed: int, device: torch.device, num_layers: int) -> torch.Tensor:
    import torch

    return torch.tensor([[seed, 0, layer, 0] for layer in range(num_layers)], device=device)


@functools.lru_cache(maxsize=4)
def _step_in_row(step: int, device: torch.device) -> torch.Tensor:
    import torch

    return copy_to_device(torch.tensor([0, step, 0, 0]), device)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; the host does not wait for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # from pageable memory the copy would wait for the queued work
    return tensor.to(device, non_blocking=True)


def drop_threshold(probability: float) -> int:
    """Return probability * 2**32, rounded; an element is dropped if its 32 random bits are below it.

    Probability 1 gives 2**32, which is above all bits.
    """
    return round(probability * 2**32)


def _fill_in_slices(
    grid: np.ndarray,
    fill: Fill,
    seed: int,
    purpose: Purpose,
    step: int,
    rows: np.ndarray,
    first_block: int,
    num_threads: int,
) -> None:
    """Fill a grid with keyed random numbers by calls of `fill` on rectangles of it, in up to `num_threads` threads.

    The grid is [R, 4 * blocks], and `first_block` is its first position divided by 4. The values do not depend on the
    rectangles. Threads run in parallel because `fill` releases the interpreter lock.
    """
    num_rows = len(rows)
    num_blocks = grid.shape[1] // 4
    blocks_per_slice = max(1, min(num_blocks, _CELLS_PER_SLICE))
    rows_per_slice = _CELLS_PER_SLICE // blocks_per_slice
    first_rows = range(0, num_rows, rows_per_slice)
    first_blocks = range(0, num_blocks, blocks_per_slice)

    def fill_slice(corner: tuple[int, int]) -> None:
        row, block = corner
        row_slice = slice(row, row + rows_per_slice)
        position_slice = slice(4 * block, 4 * (block + blocks_per_slice))
        fill(grid[row_slice, position_slice], seed, purpose, step, rows[row_slice], first_block + block)

    cpu_library.share(fill_slice, list(itertools.product(first_rows, first_blocks)), num_threads)


def _fill_bits(grid: np.ndarray, seed: int, purpose: int, step: int, rows: np.ndarray, first_block: int) -> None:
    """Fill an int64 grid, [R, 4 * blocks], with random bits by NumPy, for machines without the C library.

    `first_block` is the grid's first position divided by 4.
    """
    num_blocks = grid.shape[1] // 4
    blocks = np.arange(num_blocks, dtype=np.uint64) + np.uint64(first_block)
    # The words of the counter are not yet grids: a word that depends on one axis only stays small in the first rounds.
    block_word = blocks[None, :]
    row_word = rows.astype(np.uint64)[:, None]
    step_word = np.full((1, 1), step, np.uint64)
    purpose_word = np.full((1, 1), purpose, np.uint64)
    words = philox4x32((block_word, row_word, step_word, purpose_word), seed)
    # Word i of a block is the bits of the block's position i.
    for i, word in enumerate(words):
        grid[:, i::4] = word


def derive_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """Return a 63-bit seed for a component that has a random generator of its own, such as a torch.Generator.

    Up to two numbers in [0, 2**32) distinguish the seeds of one purpose; an omitted number counts as 0.
    """
    assert len(numbers) <= 2, f"{len(numbers)} numbers distinguish the seed: pass at most 2"
    padded = (*numbers, 0, 0)
    counter = (np.array([0], np.uint64), np.uint64(padded[0]), np.uint64(padded[1]), np.uint64(int(purpose)))
    high, low, _, _ = philox4x32(counter, seed)
    bits_64 = (int(high[0]) << 32) | int(low[0])
    return bits_64 & (2**63 - 1)  # torch takes seeds as signed 64-bit numbers
