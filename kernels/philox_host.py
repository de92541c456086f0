"""Keyed bits and permutations by `philox.c`, where the package was built with a C compiler.

Guarantee: bit for bit what `keyed_random.py` and `data/order.py` define in NumPy, which serve where the library is
missing: then these functions are None. A call lets go of the interpreter, so threads share the work.

Cost, of a core: about 1 ns a 32-bit number (NumPy 10), 0.1 to 0.2 us a place of the row order (NumPy 2).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_WORD, _WORD32, _SIZE = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int


def _load() -> ctypes.CDLL | None:
    """The library beside this file; None if it was not built, or for another kind of machine."""
    for path in Path(__file__).parent.glob("philox_library*.so"):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        grid: list[Any] = [_WORD, _WORD32, _WORD32, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE]
        library.electra_bits.argtypes = [*grid, _POINTER]
        library.electra_keep_scale.argtypes = [*grid, _WORD, ctypes.c_float, _POINTER]
        library.electra_permute.argtypes = [_WORD, _WORD32, _COUNT, *[_POINTER] * 4, _SIZE, _POINTER]
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


fill_bits: Callable[..., None] | None = _fill_bits if _library else None
fill_kept: Callable[..., None] | None = _fill_kept if _library else None
permute: Callable[..., np.ndarray] | None = _permute if _library else None
