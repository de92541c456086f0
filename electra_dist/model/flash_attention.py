"""Compute attention inside examples of any length with torch's FlashAttention kernels, dropout and windows included.

Guarantee: dropout draws from torch's generator. The forward pass returns that generator's state, from which the
backward pass drops the same probabilities. In torch's deterministic mode the backward pass adds in a fixed order.

How: query, key and value are views of one tensor [T, 3, N, D], the result of the matrix product that computes them, so
nothing is copied before the kernel. The three gradients are copied into one tensor, because torch's operator allocates
them itself; the same pass sums them for the bias of that product. Under torch.compile two custom operators take the
place of the autograd function, because the backward pass has to switch a mode of torch while it runs.

`use_kernels` changes, for the whole process, which kernels torch's operators run: torch's own, or those of the package
flash-attn-3.

Limits: bf16 and fp16 on GPUs of compute capability 8.0 or higher; the width of a head is a multiple of 8, at most 256.
The operator is private in torch, and is called with the arguments that versions 2.11 to 2.13 have in common.

Shapes: T = B * S tokens of all rows, N heads, D features of a head, H = N * D.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from electra_kernels.keyed_random import copy_to_device
from electra_kernels.layer_passes import join_gradients
from electra_kernels.operation_types import SpecialIds
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.nn import attention as torch_attention

# The operators, which tests replace by their definition in plain PyTorch.
_forward_operator = torch.ops.aten._flash_attention_forward
_backward_operator = torch.ops.aten._flash_attention_backward

_LEAST_CAPABILITY = (8, 0)  # compute capability that torch's kernels need
_WIDTH_MULTIPLE = 8  # the width of a head must be a multiple of it
_MOST_WIDTH = 256  # widest head of the kernels
_LEAST_SEQUENCES_PER_ROW = 2  # room for one example and the pads in every row
_FLASH3_CAPABILITY = (9, 0)  # the only compute capability for which torch runs the kernels of flash-attn-3
_FLASH3_MODULE = "flash_attn_interface"  # of the package flash-attn-3


class ExampleBounds(NamedTuple):
    """Where each example begins in the T = B * S tokens of all rows, one row after another, for FlashAttention."""

    cu_seqlens: torch.Tensor  # int32 [L + 1]: first token of each of L sequences in the line, then T; never decreases
    longest: int  # upper bound of the tokens of a sequence: the row length

    def to(self, device: torch.device) -> ExampleBounds:
        """Return the bounds on a device; the host does not wait for the copy to a GPU."""
        return ExampleBounds(copy_to_device(self.cu_seqlens, device), self.longest)


def example_bounds(ids_BS: NDArray[Any], special: SpecialIds) -> ExampleBounds:
    """Return where the examples of rows begin, from their original token ids in host memory.

    Empty sequences are added at the end until their number is the number of rows times a power of two. So most batches
    have tensors of one size, which compiled code needs.
    """
    num_rows, row_length = ids_BS.shape
    is_pad_BS = ids_BS == special.pad
    begins_BS = ids_BS == special.cls
    begins_BS[:, 0] = True  # no sequence crosses the border of two rows
    begins_BS[:, 1:] |= is_pad_BS[:, 1:] & ~is_pad_BS[:, :-1]  # the first pad of a row
    first_tokens = np.flatnonzero(begins_BS)

    # A fixed upper bound would be too large: a row may hold an example for every 5 tokens, and each empty sequence
    # costs idle thread blocks and 128 tokens of workspace in every backward pass of attention.
    sequences_per_row = _LEAST_SEQUENCES_PER_ROW
    while num_rows * sequences_per_row < len(first_tokens):
        sequences_per_row *= 2
    num_sequences = num_rows * sequences_per_row
    cu_seqlens = np.full(num_sequences + 1, ids_BS.size, np.int32)
    cu_seqlens[: len(first_tokens)] = first_tokens
    return ExampleBounds(torch.from_numpy(cu_seqlens), longest=row_length)


def kernel_limit(precision: str, head_widths: Sequence[int]) -> str:
    """Return why torch's FlashAttention kernels cannot run a model on the current GPU, or "" if they can."""
    if precision == "fp32":
        return "it computes in bf16 or fp16, and train.precision is fp32"
    for width in head_widths:
        if width % _WIDTH_MULTIPLE or width > _MOST_WIDTH:
            return f"a head of width {width} is not a multiple of {_WIDTH_MULTIPLE} up to {_MOST_WIDTH}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0"
    return ""


def flash3_limit(dropout: float) -> str:
    """Return why the kernels of the package flash-attn-3 cannot run on the current GPU, or "" if they can.

    `dropout` is that of attention. `kernel_limit` checks what both kinds of kernels need.
    """
    if not flash3_is_installed():
        return "it needs the package flash-attn-3, which is not installed"
    if dropout:
        return f"it has no dropout, and that of attention is {dropout:g}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != _FLASH3_CAPABILITY:
        return f"the GPU has compute capability {major}.{minor}, and torch runs these kernels on 9.0 only"
    return ""


def flash3_is_installed() -> bool:
    """Return whether the package flash-attn-3 is installed, without importing it."""
    return importlib.util.find_spec(_FLASH3_MODULE) is not None


def use_kernels(package: str | None) -> None:
    """Make torch's FlashAttention operators run the kernels of a package that torch knows ("FA3"), or its own (None).

    Raises ImportError, RuntimeError or ValueError if the package is missing or wrong, or torch is too old.
    """
    if package is not None:
        if not hasattr(torch_attention, "activate_flash_attention_impl"):
            raise RuntimeError(f"torch {torch.__version__} cannot run other kernels than its own")
        torch_attention.activate_flash_attention_impl(package)
    elif used_kernels() is not None:
        torch_attention.restore_flash_attention_impl()


def used_kernels() -> str | None:
    """Return the package whose kernels torch's operators run, such as "FA3"; None for torch's own."""
    current = getattr(torch_attention, "current_flash_attention_impl", lambda: None)
    name: str | None = current()
    return name


def flash_attention(
    qkv: torch.Tensor,
    num_heads: int,
    bounds: ExampleBounds,
    dropout: float = 0.0,
    reach: int | None = None,
    bias: torch.Tensor | None = None,
    backend: str = "reference",
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(D)) v within each example, [T, H], from `qkv`, query, key and value, [T, 3 H].

    Both are contiguous. `bounds` says where the examples begin. With `reach`, a token sees only that many tokens to
    each side. `bias`, [3 H], is one that `qkv` contains already and whose gradient is computed here, in eager mode
    only, by `backend` ("triton" or "reference").
    """
    if torch.compiler.is_compiling():
        qkv_T3ND = qkv.view(len(qkv), 3, num_heads, -1)
        out_TND: torch.Tensor = _compiled_forward(qkv_T3ND, bounds.cu_seqlens, bounds.longest, dropout, reach)[0]
        return out_TND.view(len(qkv), -1)
    context_TH: torch.Tensor = _FlashAttention.apply(
        qkv, bias, num_heads, bounds.cu_seqlens, bounds.longest, dropout, reach, backend
    )
    return context_TH


class _Saved(NamedTuple):
    """Results of torch's FlashAttention operator that its backward pass needs."""

    out_TND: torch.Tensor
    logsumexp_NT: torch.Tensor  # fp32 logarithms of the sums that the softmax divides by
    rng_state: torch.Tensor  # state of the random numbers that dropout drew
    rng_unused: torch.Tensor  # second part of that state in other builds of torch


class _FlashAttention(torch.autograd.Function):
    """FlashAttention for eager mode; it splits `qkv` into heads itself, so that autograd does not record the views."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        num_heads: int,
        cu_seqlens: torch.Tensor,
        longest: int,
        dropout: float,
        reach: int | None,
        backend: str,
    ) -> torch.Tensor:
        num_tokens = len(qkv)
        query, key, value = qkv.view(num_tokens, 3, num_heads, -1).unbind(1)
        saved = _run_forward(query, key, value, cu_seqlens, longest, dropout, reach)
        ctx.save_for_backward(query, key, value, cu_seqlens, *saved)
        ctx.settings = (longest, dropout, reach)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend = backend
        return saved.out_TND.view(num_tokens, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, cu_seqlens, *saved = ctx.saved_tensors
        grad_TND = grad_TH.view(query.shape)
        grads_TND = _run_backward(grad_TND, query, key, value, cu_seqlens, _Saved(*saved), *ctx.settings)
        if ctx.bias_dtype is None:
            grad_T3ND, grad_bias = torch.stack(grads_TND, 1), None
        else:
            grad_T3ND, grad_bias = join_gradients(*grads_TND, ctx.bias_dtype, ctx.backend)
        return grad_T3ND.view(len(grad_TH), -1), grad_bias, *[None] * 6


def _run_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    dropout: float,
    reach: int | None,
) -> _Saved:
    """Compute attention by torch's FlashAttention operator; queries, keys and values are [T, N, D] each.

    `cu_seqlens` are the boundaries of the examples in T, `longest` is the length of the longest example. A token
    attends to tokens up to `reach` positions away (None: to its whole example).
    """
    is_causal = False
    return_debug_mask = False
    out, logsumexp, rng_state, rng_unused, _debug_mask = _forward_operator(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout,
        is_causal,
        return_debug_mask,
        window_size_left=reach,
        window_size_right=reach,
    )
    return _Saved(out, logsumexp, rng_state, rng_unused)


def _run_backward(
    grad_TND: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    saved: _Saved,
    longest: int,
    dropout: float,
    reach: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, [T, N, D] each, by torch's FlashAttention operator.

    The arguments are those of `_run_forward`, what it has saved, and the gradient of its output.
    """
    is_causal = False
    with _in_fixed_order():
        query_grad, key_grad, value_grad = _backward_operator(
            grad_TND,
            query,
            key,
            value,
            saved.out_TND,
            saved.logsumexp_NT,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            dropout,
            is_causal,
            saved.rng_state,
            saved.rng_unused,
            window_size_left=reach,
            window_size_right=reach,
        )
    return query_grad, key_grad, value_grad


@contextlib.contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Within this context, make torch's deterministic mode strict if the run has set it to only warn."""
    # The run sets `warn_only`, because operations without a deterministic version must still run. With it, however,
    # torch also uses FlashAttention's atomic additions, and only warns
    # (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not (torch.are_deterministic_algorithms_enabled() and only_warns):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


@torch.library.custom_op("electra::flash_attention", mutates_args=())
def _compiled_forward(
    qkv_T3ND: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, dropout: float, reach: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention by `_run_forward` as a custom operator for torch.compile; return the fields of `_Saved`."""
    query, key, value = qkv_T3ND.unbind(1)
    saved = _run_forward(query, key, value, cu_seqlens, longest, dropout, reach)
    return saved.out_TND, saved.logsumexp_NT, saved.rng_state, saved.rng_unused


@_compiled_forward.register_fake
def _forward_shapes(
    qkv_T3ND: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, _, num_heads, head_width = qkv_T3ND.shape
    out_TND = qkv_T3ND.new_empty(num_tokens, num_heads, head_width)
    logsumexp_NT = qkv_T3ND.new_empty(num_heads, num_tokens, dtype=torch.float32)
    rng_state = qkv_T3ND.new_empty(2, dtype=torch.uint64)
    rng_unused = qkv_T3ND.new_empty((), dtype=torch.uint64)
    return out_TND, logsumexp_NT, rng_state, rng_unused


@torch.library.custom_op("electra::flash_attention_backward", mutates_args=())
def _compiled_backward(
    grad_TND: torch.Tensor,
    qkv_T3ND: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out_TND: torch.Tensor,
    logsumexp_NT: torch.Tensor,
    rng_state: torch.Tensor,
    rng_unused: torch.Tensor,
    longest: int,
    dropout: float,
    reach: int | None,
) -> torch.Tensor:
    """Compute gradients by `_run_backward` as a custom operator for torch.compile; takes the fields of `_Saved`."""
    query, key, value = qkv_T3ND.unbind(1)
    saved = _Saved(out_TND, logsumexp_NT, rng_state, rng_unused)
    return torch.stack(_run_backward(grad_TND, query, key, value, cu_seqlens, saved, longest, dropout, reach), 1)


@_compiled_backward.register_fake
def _backward_shape(grad_TND: torch.Tensor, qkv_T3ND: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(qkv_T3ND, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    qkv_T3ND, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(qkv_T3ND, cu_seqlens, *output)


def _autograd_backward(ctx: Any, grad_TND: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    grad_T3ND = _compiled_backward(grad_TND.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return grad_T3ND, None, None, None, None


_compiled_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
