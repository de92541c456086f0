"""The GPU's ceilings: the bandwidth of a copy, and the speed of the model's matrix products alone. A part of `gpu.py`.

Everything else that `gpu.py` times can be compared with these: an operation that is limited by memory with the copy,
and a training step with the time of its products.

Shapes: a product [m, k] x [k, n] has 2 m n k FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from gpu_parts.cases import Sizes
from gpu_parts.recording import Case, Row, Rows
from gpu_parts.timing import time_and_peak

from electra_dist.config import ModelConfig

_COPY_BYTES = 4 * 2**30
_TOY_COPY_BYTES = 2**16


class _Product(NamedTuple):
    """One linear layer of the model, as the product [m, k] x [k, n]."""

    name: str
    m: int
    n: int
    k: int


def ceilings(model: ModelConfig, sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the copy and every product of the model at the benchmark's number of rows, each in all three directions.

    Args:
        model: Widths of both towers and of the embeddings.
        sizes: Rows, tokens and masked positions.
        device: "cuda" or "cpu".
        dtype: Type of the products.
    """
    num_bytes = _COPY_BYTES if device == "cuda" else _TOY_COPY_BYTES
    yield Case("copy", f"{num_bytes / 2**30:.0f} GiB", "product", lambda: _copy(device, num_bytes))
    for product in _products(model, sizes):
        operation = f"{product.name} {product.m}x{product.n}x{product.k}"
        for direction in ("forward", "input gradient", "weight gradient"):

            def run(product: _Product = product, direction: str = direction, operation: str = operation) -> Rows:
                return _multiply(product, direction, operation, device, dtype)

            yield Case(operation, direction, "product", run)


def _products(model: ModelConfig, sizes: Sizes) -> list[_Product]:
    """Return the linear layers of the model, without repetitions, and a square product of 8,192."""
    num_tokens = sizes.batch * sizes.seq_len
    found = []
    for name in ("discriminator", "generator"):
        tower = getattr(model, name)
        hidden, wide = tower.hidden_size, tower.intermediate_size
        found += [
            _Product(f"{name} qkv", num_tokens, 3 * hidden, hidden),
            _Product(f"{name} attention output", num_tokens, hidden, hidden),
            _Product(f"{name} feed-forward in", num_tokens, wide, hidden),
            _Product(f"{name} feed-forward out", num_tokens, hidden, wide),
        ]
    found.append(_Product("generator head", sizes.batch * sizes.slots, sizes.padded, model.embedding_size))
    square = 8192 if sizes.batch * sizes.seq_len > 8192 else 32
    return [*found, _Product("square", square, square, square)]


def _copy(device: str, num_bytes: int) -> Rows:
    """Time a copy within the device; `tb_per_s` counts the bytes read and the bytes written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    row: Row = {
        "operation": "copy",
        "by": f"{num_bytes / 2**30:.0f} GiB",
        **time_and_peak(lambda: target.copy_(source)),
    }
    return [row | {"tb_per_s": 2 * num_bytes / row["ms"] / 1e9}]


def _multiply(product: _Product, direction: str, operation: str, device: str, dtype: torch.dtype) -> Rows:
    """Time one product of a linear layer with random numbers (a product of zeros is faster than any other)."""
    x_mk = torch.randn(product.m, product.k, device=device, dtype=dtype)
    weight_nk = torch.randn(product.n, product.k, device=device, dtype=dtype)
    upstream_mn = torch.randn(product.m, product.n, device=device, dtype=dtype)
    calls = {
        "forward": lambda: x_mk @ weight_nk.t(),
        "input gradient": lambda: upstream_mn @ weight_nk,
        "weight gradient": lambda: upstream_mn.t() @ x_mk,
    }
    row: Row = {"operation": operation, "by": direction, **time_and_peak(calls[direction])}
    return [row | {"tflop_per_s": 2 * product.m * product.n * product.k / row["ms"] / 1e9}]
