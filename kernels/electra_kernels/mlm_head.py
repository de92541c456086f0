"""The generator's head: tied decoder, cross-entropy, replacement sample and gradients in one pass.

Guarantee: loss, samples and all gradients of `softmax(x W^T + bias)` without logits of the whole batch ever existing:
they live one chunk of 4096 rows at a time. Gradients are made in forward, while a chunk is at hand, and multiplied by
the upstream scalar in backward. Gradients of weight and bias are summed over chunks in fp32. Padded vocabulary rows
are neither in the softmax nor drawn. Rows of weight 0 add nothing, whatever they hold. Nothing waits for the device.

How: per chunk one matrix product for the logits, one row pass (bias, log-sum-exp, loss, Gumbel-max sample, and
(softmax - onehot) * weight in place of the logits), and two matrix products for dX and dW. The row pass is the
reference below or the Triton kernel of `triton/mlm_head.py`; the products are the vendor's in either case, because a
kernel of ours with a computed left operand meets a miscompile on Hopper and recomputing logits would cost a fourth
product to save a quarter GB. For the same reason evaluation without gradients keeps one (smaller) chunk of logits
rather than none.

Samples: `sampling.py` says what they depend on. On a CPU the products run in fp32 whatever the precision
(low-precision ones are six times slower there), and a chunk of fewer than 8 rows is padded to 8, from where on each
row of the product is the same bit for bit in any split of the rows (seen with MKL). Chunk size and row split then
change no sample at all. On a GPU a last chunk of another size may get another cuBLAS kernel, which can move a
near-tie.

Cost at M = 8192, D = 1024, V = 30592 in bf16: 1.54 TFLOP, 1.5 GB of traffic in row passes; extra peak one chunk of
logits (0.25 GB) plus dW in fp32 (0.125 GB). On a CPU in fp32: 0.5 + 0.125 GB.

Where it stops: one backward pass, no second derivatives; torch 2.8 or newer for low precision on a GPU.

Shapes: M masked rows, D features, V padded vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from electra_kernels.backend import resolve_without_cuda
from electra_kernels.keyed_random import Purpose
from electra_kernels.native import host
from electra_kernels.op_types import RowOptions, RowStats
from electra_kernels.sampling import block_rows, sample_reference

_LEAST_ROWS_CPU = 8
_CHUNK_WITHOUT_GRADIENT = 1024


class MlmHeadOutput(NamedTuple):
    """Scalars in fp32 (fp64 for fp64 input) and the samples; only `loss_sum` carries a gradient."""

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    sampled_M: torch.Tensor
    correct_sum: torch.Tensor
    sampled_correct_sum: torch.Tensor


def mlm_head_loss_and_sample(
    x_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    *,
    seed: int,
    step: int,
    row_M: torch.Tensor,
    vocab_size: int,
    temperature: float = 1.0,
    disallow_correct: bool = False,
    chunk: int = 4096,
    backend: str = "auto",
) -> MlmHeadOutput:
    """Weighted loss sum of the masked-token head, differentiable in x, weight and bias, and a sample for each row.

    Args:
        x_MD: features; taken in `weight_VD`'s precision.
        weight_VD: token table, padded rows at the end (a multiple of 8 rows keeps the GPU's loads wide).
        bias_V: bias of V or of `vocab_size` entries; -inf forbids a token.
        target_M: int64 true tokens in [0, vocab_size), also where the weight is 0.
        weight_M: weight of each row in the loss, >= 0.
        seed: the run's seed.
        step: global step, in [0, 2**32).
        row_M: int64, number of each masked row within the global batch, in [0, 2**32).
        vocab_size: tokens that exist.
        temperature: divides the logits before sampling, never in the loss.
        disallow_correct: never draw the true token.
        chunk: rows of logits that exist at a time.
        backend: see `backend.resolve`.
    """
    differentiable = any(t.requires_grad for t in (x_MD, weight_VD, bias_V))
    options = RowOptions(
        seed, step, vocab_size, temperature, disallow_correct, torch.is_grad_enabled() and differentiable
    )
    if not options.with_gradient:
        chunk = min(chunk, _CHUNK_WITHOUT_GRADIENT)
    weight_M = weight_M.to(torch.promote_types(weight_VD.dtype, torch.float32))
    loss_M, best_M, sampled_M = _MlmHead.apply(
        x_MD.to(weight_VD.dtype),
        weight_VD,
        bias_V[:vocab_size],
        target_M,
        weight_M,
        row_M,
        options,
        chunk,
        resolve_without_cuda(backend, x_MD.device.type),
    )
    return MlmHeadOutput(
        loss_sum=loss_M,
        weight_sum=weight_M.sum(),
        sampled_M=sampled_M,
        correct_sum=((best_M == target_M) * weight_M).sum(),
        sampled_correct_sum=((sampled_M == target_M) * weight_M).sum(),
    )


def row_pass_reference(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    """The definition of the row pass: reads a chunk of logits and, with a gradient, overwrites it by dlogits.

    Computes in the precision of `weight_M` (fp32, or fp64), block by block of rows.
    """
    if host.row_pass and logits_MV.device.type == "cpu" and logits_MV.dtype == weight_M.dtype == torch.float32:
        key, how = (options.seed, int(Purpose.SAMPLE), options.step), options[3:]
        return RowStats(*host.row_pass(logits_MV, bias_V, target_M, weight_M, row_M, key, *how))
    return _row_pass_torch(logits_MV, bias_V, target_M, weight_M, row_M, options)


def _row_pass_torch(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    """The definition itself, in torch."""
    height = block_rows(logits_MV)
    stats = RowStats(torch.empty_like(weight_M), torch.empty_like(target_M), torch.empty_like(target_M))
    for begin in range(0, len(logits_MV), height):
        b = slice(begin, begin + height)
        # Copied at once: small results kept between large temporaries would cut the heap into holes (1 GB in a chunk).
        for whole, part in zip(stats, _row_block(logits_MV[b], bias_V, target_M[b], weight_M[b], row_M[b], options)):
            whole[b] = part
    return stats


def _row_block(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    z_MV = logits_MV[:, : options.vocab_size].to(weight_M.dtype) + bias_V.to(weight_M.dtype)
    forbidden_M = target_M if options.disallow_correct else None
    sampled_M = sample_reference(z_MV, options.seed, options.step, row_M, options.temperature, forbidden_M)
    target_M1 = target_M[:, None]
    z_target_M = z_MV.gather(1, target_M1)[:, 0]
    top_M, best_M = z_MV.max(1)
    exp_MV = z_MV.sub_(top_M[:, None]).exp_()
    sum_M = exp_MV.sum(1)
    loss_M = sum_M.log() + (top_M - z_target_M)
    if options.with_gradient:
        # softmax - onehot is formed before it is rounded to the logits' precision: a confident row keeps its gradient.
        softmax_MV = exp_MV.div_(sum_M[:, None])
        softmax_MV.scatter_add_(1, target_M1, -torch.ones_like(z_target_M)[:, None])
        logits_MV[:, : options.vocab_size] = softmax_MV.mul_(weight_M[:, None])
        logits_MV[:, options.vocab_size :] = 0
    return RowStats(loss_M, best_M, sampled_M)


class _MlmHead(torch.autograd.Function):
    """Sum of weighted losses, most likely tokens and samples; the gradients are made in forward and kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor,
        target_M: torch.Tensor,
        weight_M: torch.Tensor,
        row_M: torch.Tensor,
        options: RowOptions,
        chunk: int,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        on_cpu = x_MD.device.type == "cpu"
        compute = torch.promote_types(x_MD.dtype, torch.float32) if on_cpu else x_MD.dtype
        accumulate = weight_M.dtype
        x_MD, table_VD = x_MD.to(compute), weight_VD.to(compute)
        num_rows = len(x_MD)
        buffer = x_MD.new_empty(max(min(chunk, num_rows), _LEAST_ROWS_CPU), len(table_VD))
        row_pass = _row_pass(backend)
        if options.with_gradient:
            grad_x_MD = torch.empty_like(x_MD)
            grad_weight_VD = torch.zeros_like(table_VD, dtype=accumulate)
            grad_bias_V = torch.zeros(len(table_VD), dtype=accumulate, device=x_MD.device)
        stats = []
        for begin in range(0, num_rows, chunk):
            rows = slice(begin, min(begin + chunk, num_rows))
            logits_MV = _logits(x_MD[rows], table_VD, buffer, on_cpu)
            stats.append(row_pass(logits_MV, bias_V, target_M[rows], weight_M[rows], row_M[rows], options))
            if options.with_gradient:
                torch.mm(logits_MV, table_VD, out=grad_x_MD[rows])
                _add_product(grad_weight_VD, logits_MV.t(), x_MD[rows])
                grad_bias_V += logits_MV.sum(0, dtype=accumulate)
        loss_M, best_M, sampled_M = (torch.cat(column) for column in zip(*stats))
        if options.with_gradient:
            ctx.save_for_backward(grad_x_MD, grad_weight_VD, grad_bias_V[: len(bias_V)])
        ctx.mark_non_differentiable(best_M, sampled_M)
        return torch.where(weight_M > 0, loss_M * weight_M, 0).sum(), best_M, sampled_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # Autograd casts each gradient to the precision of its input.
        grads = [grad * grad_loss for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None, None, None)


def _row_pass(backend: str) -> Any:
    if backend == "triton":
        from electra_kernels.triton.mlm_head import row_pass

        return row_pass
    return row_pass_reference


def _logits(x_MD: torch.Tensor, table_VD: torch.Tensor, buffer: torch.Tensor, on_cpu: bool) -> torch.Tensor:
    """x W^T in the buffer's first rows; on a CPU from at least 8 rows, so that a row's bits ignore its neighbours."""
    num_rows = len(x_MD)
    if on_cpu and num_rows < _LEAST_ROWS_CPU:
        x_MD = torch.cat([x_MD, x_MD.new_zeros(_LEAST_ROWS_CPU - num_rows, x_MD.shape[1])])
    torch.mm(x_MD, table_VD.t(), out=buffer[: len(x_MD)])
    return buffer[:num_rows]


def _add_product(sum_VD: torch.Tensor, a_VM: torch.Tensor, b_MD: torch.Tensor) -> None:
    """sum += a b with the sum, and the products' own accumulation, in the sum's precision."""
    if a_VM.dtype == sum_VD.dtype:
        sum_VD.addmm_(a_VM, b_MD)
    elif _can_add_low_precision_products(a_VM.device, a_VM.dtype):
        torch.addmm(sum_VD, a_VM, b_MD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += torch.mm(a_VM, b_MD, out_dtype=sum_VD.dtype)


@functools.cache
def _can_add_low_precision_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a low-precision product to an fp32 matrix in place; 2.8 needs a second matrix."""
    a, total = torch.zeros(8, 8, device=device, dtype=dtype), torch.zeros(8, 8, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
