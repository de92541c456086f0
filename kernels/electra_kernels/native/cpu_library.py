"""Call the C library `cpu_library.c`: random bits, permutations, rows of shards, the token head's row pass.

The row pass computes loss, most likely token, sampled token and gradient of each row of logits.

Guarantee: permutations, bits and checksums are equal to those that `data/order.py`, `keyed_random.py` and
`data/receipt.py` define in NumPy, and the row pass agrees with that of `mlm_head.py` to fp32 rounding. The
library exists where the package was built with a C compiler. Where it is missing, `fill_bits`, `fill_kept`, `permute`,
`row_checksums`, `gather_rows` and `row_pass` are None, and callers use NumPy or torch.

How: a call releases the interpreter lock; `share` spreads calls over threads. Arguments and results are arrays of
NumPy, because commands and workers that build or check corpora do not import torch.

Cost on one core: about 1 ns for a 32-bit number (NumPy 10), 0.1 to 0.2 us to permute one number for the order of rows
(NumPy 2), 5 ns for a logit (torch 50).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

# Argument types of the C functions.
_WORD = ctypes.c_uint64
_WORD32 = ctypes.c_uint32
_SIZE = ctypes.c_int64
_WIDTH = ctypes.c_int32
_COUNT = ctypes.c_int
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p

_VERSION = 2  # of the functions' arguments, equal to `electra_cpu_library_version` in cpu_library.c
_ROWS_AT_A_TIME = 8  # rows that one call of the row pass handles
# Results of `electra_gather_rows` that are not the number of a row, as cpu_library.c defines them.
_ALL_GOOD = -1
_OUTSIDE = -2
_Item = TypeVar("_Item")


def share(work: Callable[[_Item], object], items: Sequence[_Item], num_threads: int) -> None:
    """Call `work` on each item, in up to `num_threads` threads, and return when all calls are over.

    Threads run in parallel only while `work` releases the interpreter lock. If calls fail, the exception of the first
    failed item, in the order of `items`, is raised. With one item or one thread, the calling thread makes all calls.
    """
    num_threads = min(num_threads, len(items))
    if num_threads <= 1:
        for item in items:
            work(item)
        return
    pool = _pool(num_threads, os.getpid())
    for _ in pool.map(work, items):
        pass  # reading a result waits for its call and raises its exception


@functools.cache
def _pool(num_threads: int, process_id: int) -> ThreadPoolExecutor:
    """Return this process's thread pool; a forked process gets a new one, because a fork copies no threads."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="electra-cpu-library")


def _load() -> ctypes.CDLL | None:
    """Load the C library beside this file; return None if there is none for this machine and `_VERSION`."""
    # A library of another version has functions that take other arguments (`electra_cpu_library_version` in
    # cpu_library.c).
    for path in Path(__file__).parent.glob("compiled_cpu_library*.so"):
        try:
            library = ctypes.CDLL(str(path))
            version = ctypes.c_int.in_dll(library, "electra_cpu_library_version").value
        except (OSError, ValueError):
            continue  # not a library of this machine, or one without a version
        if version == _VERSION:
            _declare_arguments(library)
            return library
    return None


def _declare_arguments(library: ctypes.CDLL) -> None:
    """Declare the argument types of the C functions; without them ctypes would pass 64-bit numbers as 32-bit."""
    key: list[Any] = [_WORD, _WORD32, _WORD32]  # seed, purpose, step
    grid: list[Any] = [*key, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE]  # rows, num_rows, first_block, num_blocks, stride
    library.electra_bits.argtypes = [*grid, _POINTER]
    library.electra_keep_scale.argtypes = [*grid, _WORD, _FLOAT, _POINTER]

    permutation_inputs: list[Any] = [_POINTER] * 4  # index, size, epoch, block
    library.electra_permute.argtypes = [_WORD, _WORD32, _COUNT, *permutation_inputs, _SIZE, _POINTER]

    library.electra_row_checksums.argtypes = [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER]
    library.electra_row_checksums.restype = None

    gather_inputs: list[Any] = [_POINTER] * 3  # tables, which, rows
    library.electra_gather_rows.argtypes = [*gather_inputs, _SIZE, _SIZE, _POINTER, _POINTER]
    library.electra_gather_rows.restype = _SIZE

    logits: list[Any] = [_POINTER, _SIZE, _POINTER, _SIZE, _WIDTH]  # rows, num_rows, logits, stride, vocab
    row_inputs: list[Any] = [_POINTER] * 3  # bias, target, weight
    row_options: list[Any] = [_FLOAT, _COUNT, _COUNT]  # per_temperature, disallow_correct, with_gradient
    row_outputs: list[Any] = [_POINTER] * 3  # loss, most_likely, sampled
    library.electra_row_pass.argtypes = [*key, *logits, *row_inputs, *row_options, *row_outputs]


_library = _load()


def _fill_bits(grid: np.ndarray, seed: int, purpose: int, step: int, rows: np.ndarray, first_block: int) -> None:
    """Fill `grid`, int64 [R, 4 * blocks], with the random bits that `keyed_random.bits_grid` defines, in C.

    Columns of the grid are adjacent; its rows may be part of a wider array. `first_block` is the grid's first position
    divided by 4. `rows` are the row numbers, contiguous int64.
    """
    assert _library is not None
    assert grid.dtype == np.int64
    arguments = _grid_arguments(grid, seed, purpose, step, rows, first_block)
    _library.electra_bits(*arguments, grid.ctypes.data)


def _fill_kept(
    grid: np.ndarray,
    seed: int,
    purpose: int,
    step: int,
    rows: np.ndarray,
    first_block: int,
    *,
    threshold: int,
    scale: float,
) -> None:
    """Fill `grid`, fp32, with `scale` where the bits of `_fill_bits` are at least `threshold`, and 0 elsewhere."""
    assert _library is not None
    assert grid.dtype == np.float32
    arguments = _grid_arguments(grid, seed, purpose, step, rows, first_block)
    _library.electra_keep_scale(*arguments, threshold, scale, grid.ctypes.data)


def _grid_arguments(
    grid: np.ndarray, seed: int, purpose: int, step: int, rows: np.ndarray, first_block: int
) -> tuple[Any, ...]:
    """Return the arguments with which the C functions that fill a grid begin; the memory layout is asserted first."""
    assert grid.strides[1] == grid.itemsize, "the columns of the grid are not adjacent: pass a row-major array"
    assert rows.dtype == np.int64
    assert rows.flags.c_contiguous
    num_blocks = grid.shape[1] // 4
    stride = grid.strides[0] // grid.itemsize
    return seed, purpose, step, rows.ctypes.data, len(rows), first_block, num_blocks, stride


def _permute(
    index: np.ndarray, size: np.ndarray, epoch: np.ndarray, block: np.ndarray, seed: int, purpose: int, num_rounds: int
) -> np.ndarray:
    """Return, for each i, the place in [0, size[i]) to which a random permutation moves index[i], as uint64.

    The key of the permutation is (seed, purpose, epoch[i], block[i]). `permute` of `electra_dist/data/order.py`
    does the same in NumPy.
    """
    assert _library is not None
    # C reads contiguous arrays. The names keep the converted arrays alive during the call.
    index = np.ascontiguousarray(index, np.uint64)
    size = np.ascontiguousarray(size, np.uint64)
    epoch = np.ascontiguousarray(epoch, np.uint64)
    block = np.ascontiguousarray(block, np.uint64)
    place = np.empty_like(index)
    _library.electra_permute(
        seed,
        purpose,
        num_rounds,
        index.ctypes.data,
        size.ctypes.data,
        epoch.ctypes.data,
        block.ctypes.data,
        len(place),
        place.ctypes.data,
    )
    return place


def _row_checksums(rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the checksum of each row, uint64 [k]; `electra_dist/data/receipt.py` defines it in NumPy.

    `rows` are contiguous [k, seq_len] integers, and may be a mapped file. `keys` are contiguous uint32, one for each
    32-bit word of a row and for the bytes after the last whole word.
    """
    assert _library is not None
    assert rows.flags.c_contiguous
    row_bytes = rows.shape[1] * rows.itemsize
    assert keys.dtype == np.uint32
    assert keys.flags.c_contiguous
    assert 4 * len(keys) >= row_bytes
    checksums = np.empty(len(rows), np.uint64)
    _library.electra_row_checksums(rows.ctypes.data, len(rows), row_bytes, keys.ctypes.data, checksums.ctypes.data)
    return checksums


def _gather_rows(
    tables: Sequence[tuple[int, int, int, int, int]],
    which: np.ndarray,
    rows: np.ndarray,
    out: np.ndarray,
    keys: np.ndarray | None,
) -> int | None:
    """Copy row `rows[k]` of shard `which[k]` to `out[k]` for every k, and verify the copies' checksums.

    Return the first k whose copy does not match the checksum that its shard lists, or None if all match. Without
    `keys`, checksums are not compared. `tables` holds the `table` of each `electra_dist.data.shard.Shard`: where its
    rows and their checksums lie in memory. The mapped files must stay open during the call. IndexError: a row number
    is not in its shard; the rows of `out` before it are filled.
    """
    assert _library is not None
    assert out.flags.c_contiguous
    assert len(which) == len(rows) == len(out)
    table = np.array(tables, np.int64)
    which = np.ascontiguousarray(which, np.int64)
    rows = np.ascontiguousarray(rows, np.int64)
    row_bytes = out.shape[1] * out.itemsize
    assert keys is None or 4 * len(keys) >= row_bytes
    outcome = _library.electra_gather_rows(
        table.ctypes.data,
        which.ctypes.data,
        rows.ctypes.data,
        len(out),
        row_bytes,
        None if keys is None else keys.ctypes.data,
        out.ctypes.data,
    )
    if outcome == _OUTSIDE:
        raise IndexError(
            f"one of {len(rows)} row numbers, {rows.min()} to {rows.max()}, is outside its shard: "
            "pass numbers of at least 0 and below the number of rows of the shard"
        )
    return None if outcome == _ALL_GOOD else int(outcome)


def _row_pass(
    logits_MV: np.ndarray,
    bias_V: np.ndarray,
    target_M: np.ndarray,
    weight_M: np.ndarray,
    row_M: np.ndarray,
    key: tuple[int, int, int],
    temperature: float,
    disallow_correct: bool,
    with_gradient: bool,
    num_threads: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run `mlm_head.row_pass_reference` in C; return each row's unweighted loss, most likely token and drawn token.

    `key` is seed, purpose and step of the sampling noise. The computation is in fp32; columns of the logits are
    adjacent.
    """
    library = _library
    assert library is not None
    assert logits_MV.dtype == weight_M.dtype == np.float32
    assert target_M.dtype == row_M.dtype == np.int64
    assert logits_MV.strides[1] == logits_MV.itemsize
    seed, purpose, step = key
    inverse_temperature = 1.0 / temperature
    bias_V = np.ascontiguousarray(bias_V, np.float32)
    row_M = np.ascontiguousarray(row_M)
    target_M = np.ascontiguousarray(target_M)
    weight_M = np.ascontiguousarray(weight_M)
    loss_M = np.empty_like(weight_M)
    best_M = np.empty_like(target_M)
    sampled_M = np.empty_like(target_M)

    def run_rows_from(begin: int) -> None:
        block = slice(begin, begin + _ROWS_AT_A_TIME)
        logits = logits_MV[block]
        library.electra_row_pass(
            seed,
            purpose,
            step,
            row_M[block].ctypes.data,
            len(logits),
            logits.ctypes.data,
            logits.strides[0] // logits.itemsize,
            len(bias_V),
            bias_V.ctypes.data,
            target_M[block].ctypes.data,
            weight_M[block].ctypes.data,
            inverse_temperature,
            disallow_correct,
            with_gradient,
            loss_M[block].ctypes.data,
            best_M[block].ctypes.data,
            sampled_M[block].ctypes.data,
        )

    share(run_rows_from, range(0, len(logits_MV), _ROWS_AT_A_TIME), num_threads)
    return loss_M, best_M, sampled_M


# The public functions; None where the library was not built.
fill_bits: Callable[..., None] | None = _fill_bits if _library else None
fill_kept: Callable[..., None] | None = _fill_kept if _library else None
permute: Callable[..., np.ndarray] | None = _permute if _library else None
row_checksums: Callable[..., np.ndarray] | None = _row_checksums if _library else None
gather_rows: Callable[..., int | None] | None = _gather_rows if _library else None
row_pass: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]] | None = _row_pass if _library else None
