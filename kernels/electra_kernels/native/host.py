"""`host.c` where the package was built with a C compiler: keyed bits, the row order, rows out of
mapped shards, and the head's row pass on a CPU.

Guarantee: bit for bit the permutations and bits that `data/order.py` and `keyed_random.py` define in NumPy, and the
row pass of `mlm_head.py` to fp32 rounding. Those serve where the library is missing: then the functions here are None.

How: calls let go of the interpreter; `share` spreads them over as many threads as torch uses.

Cost, of a core: about 1 ns a 32-bit number (NumPy 10), 0.1 to 0.2 us a place of the row order (NumPy 2), 5 ns a logit
(torch 50).
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
import torch

_WORD, _WORD32, _SIZE = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64
_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_VERSION = 1  # of what the functions are given: `electra_host_version` in host.c
_ROWS_AT_A_TIME = 8  # of the row pass
_Item = TypeVar("_Item")


def share(work: Callable[[_Item], object], items: Sequence[_Item]) -> None:
    """Call `work` on each item, by as many threads as torch uses."""
    threads = min(torch.get_num_threads(), len(items))
    for _ in _pool(threads, os.getpid()).map(work, items) if threads > 1 else map(work, items):
        pass


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """`process`: a fork inherits the cache, but no threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="electra-host")


def _load() -> ctypes.CDLL | None:
    """The library beside this file; None if it was not built, for another kind of machine or version of `host.c`."""
    for path in Path(__file__).parent.glob("host_library*.so"):
        try:
            library = ctypes.CDLL(str(path))
            if ctypes.c_int.in_dll(library, "electra_host_version").value != _VERSION:
                continue
        except (OSError, ValueError):
            continue
        grid: list[Any] = [_WORD, _WORD32, _WORD32, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE]
        library.electra_bits.argtypes = [*grid, _POINTER]
        library.electra_keep_scale.argtypes = [*grid, _WORD, _FLOAT, _POINTER]
        library.electra_permute.argtypes = [_WORD, _WORD32, _COUNT, *[_POINTER] * 4, _SIZE, _POINTER]
        library.electra_gather_rows.argtypes = [*[_POINTER] * 3, _SIZE, _SIZE, _POINTER]
        row: list[Any] = [_POINTER, _SIZE, _POINTER, _SIZE, ctypes.c_int32, *[_POINTER] * 3, _FLOAT, _COUNT, _COUNT]
        library.electra_row_pass.argtypes = [_WORD, _WORD32, _WORD32, *row, *[_POINTER] * 3]
        return library
    return None


_library = _load()


def _fill_bits(grid: np.ndarray, seed: int, purpose: int, step: int, rows: np.ndarray, first_block: int) -> None:
    """Fill `grid`, int64 [R, 4 * blocks] with dense rows, with the bits of int64 `rows` from 4 * `first_block` on."""
    assert _library is not None
    assert grid.dtype == np.int64
    _library.electra_bits(*_arguments(grid, seed, purpose, step, rows, first_block), grid.ctypes.data)


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
    """As `fill_bits`, fp32: `scale` where the bits are at least `threshold`, else 0."""
    assert _library is not None
    assert grid.dtype == np.float32
    given = _arguments(grid, seed, purpose, step, rows, first_block)
    _library.electra_keep_scale(*given, threshold, scale, grid.ctypes.data)


def _arguments(
    grid: np.ndarray, seed: int, purpose: int, step: int, rows: np.ndarray, first_block: int
) -> tuple[Any, ...]:
    assert grid.strides[1] == grid.itemsize
    assert rows.dtype == np.int64
    assert rows.flags.c_contiguous
    stride = grid.strides[0] // grid.itemsize
    return seed, purpose, step, rows.ctypes.data, len(rows), first_block, grid.shape[1] // 4, stride


def _permute(
    index: np.ndarray, size: np.ndarray, epoch: np.ndarray, block: np.ndarray, seed: int, purpose: int, num_rounds: int
) -> np.ndarray:
    """`data.order.permute` of uint64 arrays of one length."""
    assert _library is not None
    given = [np.ascontiguousarray(each, np.uint64) for each in (index, size, epoch, block)]
    place = np.empty_like(given[0])
    pointers = [each.ctypes.data for each in given]
    _library.electra_permute(seed, purpose, num_rounds, *pointers, len(place), place.ctypes.data)
    return place


def _gather_rows(
    tables: Sequence[tuple[int, int, int, int]], which: np.ndarray, rows: np.ndarray, out: np.ndarray
) -> None:
    """Copy row `rows[k]` of the shard `tables[which[k]]` (`data.shard.Shard.table`) to `out[k]`."""
    assert _library is not None
    assert out.flags.c_contiguous
    assert len(which) == len(rows) == len(out)
    table = np.array(tables, np.int64)
    which, rows = (np.ascontiguousarray(each, np.int64) for each in (which, rows))
    row_bytes = out.shape[1] * out.itemsize
    given = (table.ctypes.data, which.ctypes.data, rows.ctypes.data, len(out), row_bytes)
    if not _library.electra_gather_rows(*given, out.ctypes.data):
        raise IndexError("a row is outside its shard")


def _row_pass(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    key: tuple[int, int, int],
    temperature: float,
    disallow_correct: bool,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mlm_head.row_pass_reference` of fp32 logits with dense rows; `key`: seed, purpose, step.

    Returns:
        Unweighted losses, most likely tokens, drawn tokens.
    """
    library = _library
    assert library is not None
    assert logits_MV.dtype == weight_M.dtype == torch.float32
    assert logits_MV.stride(1) == 1
    bias_V = bias_V.float().contiguous()
    row_M, target_M, weight_M = row_M.contiguous(), target_M.contiguous(), weight_M.contiguous()
    found = torch.empty_like(weight_M), torch.empty_like(target_M), torch.empty_like(target_M)
    options = (1.0 / temperature, disallow_correct, with_gradient)

    def rows_from(begin: int) -> None:
        b = slice(begin, begin + _ROWS_AT_A_TIME)
        logits, rows, targets, weights = logits_MV[b], row_M[b], target_M[b], weight_M[b]
        given = (rows.data_ptr(), len(rows), logits.data_ptr(), logits.stride(0), len(bias_V), bias_V.data_ptr())
        out = (each[b].data_ptr() for each in found)
        library.electra_row_pass(*key, *given, targets.data_ptr(), weights.data_ptr(), *options, *out)

    share(rows_from, range(0, len(logits_MV), _ROWS_AT_A_TIME))
    return found


fill_bits: Callable[..., None] | None = _fill_bits if _library else None
fill_kept: Callable[..., None] | None = _fill_kept if _library else None
permute: Callable[..., np.ndarray] | None = _permute if _library else None
gather_rows: Callable[..., None] | None = _gather_rows if _library else None
row_pass: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = _row_pass if _library else None
