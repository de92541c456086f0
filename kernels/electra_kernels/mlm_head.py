"""Compute the generator's head in one pass: tied decoder, cross-entropy, a sampled replacement per row, and gradients.

A row is a row of the matrices x and logits, that is, one masked token; it is not a row of the corpus.

Guarantee: the operation computes loss, samples and all gradients of `softmax(x W^T + bias)`, while only the logits of
one chunk (a group of rows, 4096 by default) exist at a time. The gradients of a chunk are computed in forward, before
its logits are overwritten by the next chunk, and are multiplied by the loss's upstream gradient in backward. Gradients
of weight and bias are summed over chunks in fp32. The padding of the token table is neither in the softmax nor drawn.
A row of weight 0 adds nothing to the loss, even if its own loss is inf or nan. Nothing waits for the device.

How: each chunk takes one matrix product for the logits, one row pass, and two matrix products for the gradients of x
and W. The row pass goes through each row of logits: it adds the bias, computes log-sum-exp, loss and Gumbel-max
sample, and overwrites the logits by (softmax - onehot) * weight. It is the reference in this file or the Triton kernel
of `triton/mlm_head.py`. The matrix products are the vendor's in either case, and the logits of a chunk are stored. A
kernel that fuses product and row pass would not store them, but has two drawbacks: with a computed left operand it can
be miscompiled on Hopper, and it needs a fourth product to recompute the logits, only to save a quarter GB.

Samples: one token per row by Gumbel-max. The drawn token of row m is the v with the largest `logit / temperature +
Gumbel(bits)`, where bits is `bits_grid(seed, Purpose.SAMPLE, step, row_M)[m, v]`. The noise of a token therefore does
not depend on how the work is split (into chunks, tiles, batches or ranks) or on restarts. Given the same logits, an
implementation draws the same token for any split. Two implementations can differ only where the two best candidates
are closer than their rounding (candidates 1e-4 apart are safe). A tie goes to the lower token id. A logit of -inf is
never drawn while another is finite, because the noise is always finite.

Noise: it is -log E, where E = -log(1 - u) is a draw from the exponential distribution and u = (bits + 1/2) / 2**32.
The token that wins usually has a small E, so E must be accurate where u is near 0: for u < 1/32, E is a series in u.
Elsewhere, 1 - u is computed from the complement of the bits, so that it is never rounded to 0. Thus 0 < E < 23 and the
noise lies in [-3.14, 22.88]. The plain formula in fp32 would give infinite noise 15 times a step at 8192 rows of 30522
tokens.

Logits: on a CPU, the products run in fp32 for any input precision,
because low-precision products are six times slower there. A chunk of fewer than 8 rows is padded to 8, because from 8
rows on each row of the product is the same bit for bit in any split of the rows (observed with MKL). So neither the
chunk size nor the split of the rows changes a sample. On a GPU, a last chunk of another size may get another cuBLAS
kernel, which can change the sample where two candidates are almost equal.

Cost at M = 8192, D = 1024, V = 30592 in bf16: 1.54 TFLOP, 1.5 GB of traffic in row passes; the extra peak is one chunk
of logits (0.25 GB) plus the gradient of W in fp32 (0.125 GB). On a CPU in fp32: 0.5 + 0.125 GB. Sampling reads
nothing in addition; in plain PyTorch it takes 22 ns for each logit on one core.

Limits: one backward pass, no second derivatives; torch 2.8 or newer for low precision on a GPU.

Shapes: M masked rows, D features, V padded vocabulary, or the tokens that exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from electra_kernels.backend_choice import resolve
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.native import cpu_library
from electra_kernels.operation_types import SERIES_BELOW, RowOptions, RowStats
from electra_kernels.products import add_product

_LEAST_ROWS_CPU = 8  # from this number on, a row of MKL's product does not depend on the other rows
_CHUNK_WITHOUT_GRADIENT = 1024  # rows
_MAX_BITS = (1 << 32) - 1


class MlmHeadOutput(NamedTuple):
    """Loss, accuracy counts and samples of the masked-token head; only `loss_sum` carries a gradient.

    Sums are scalars in fp32 (fp64 for fp64 input), weighted by the rows' weights.
    """

    loss_sum: torch.Tensor  # of the cross-entropies; divide by `weight_sum` for the mean
    weight_sum: torch.Tensor  # number of masked tokens for weights of 0 and 1
    sampled_M: torch.Tensor  # token drawn for each row, int64
    correct_sum: torch.Tensor  # rows whose most likely token is the true one
    sampled_correct_sum: torch.Tensor  # rows whose drawn token is the true one


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
    """Compute the weighted loss sum of the masked-token head and draw a token for each row.

    The loss is differentiable in x, weight and bias, once. Its gradients are computed in this call and kept until
    backward; under torch.no_grad, none is computed.

    Args:
        x_MD: Inputs of the decoder, in the dtype of `weight_VD` or converted to it; under autocast on a GPU, both are
            converted to autocast's dtype.
        weight_VD: Token table with padded rows at the end; a multiple of 8 rows keeps the GPU's loads wide.
        bias_V: Bias with V or with `vocab_size` entries; -inf forbids a token.
        target_M: int64 true tokens in [0, vocab_size), also where the weight is 0.
        weight_M: Weight of each masked token in the loss, at least 0.
        seed: Seed of the run.
        step: Global step, in [0, 2**32).
        row_M: int64 numbers of the masked tokens within the global batch, in [0, 2**32), which key the noise.
        vocab_size: Number of tokens that exist, at most V.
        temperature: Divisor of the logits before sampling; the loss does not use it.
        disallow_correct: Whether the true token is excluded from sampling.
        chunk: Number of rows whose logits exist at a time; without gradients at most 1024.
        backend: See `backend_choice`.
    """
    is_differentiable = any(tensor.requires_grad for tensor in (x_MD, weight_VD, bias_V))
    with_gradient = torch.is_grad_enabled() and is_differentiable
    options = RowOptions(
        seed=seed,
        step=step,
        vocab_size=vocab_size,
        temperature=temperature,
        disallow_correct=disallow_correct,
        with_gradient=with_gradient,
    )
    if not with_gradient:
        chunk = min(chunk, _CHUNK_WITHOUT_GRADIENT)
    if x_MD.device.type != "cpu":
        chunk = _without_small_rest(len(x_MD), chunk)
    weight_M = weight_M.to(torch.promote_types(weight_VD.dtype, torch.float32))
    product_dtype = _product_dtype(weight_VD)
    loss_sum, best_M, sampled_M = _MlmHead.apply(
        x_MD.to(product_dtype),
        weight_VD.to(product_dtype),
        bias_V[:vocab_size],
        target_M,
        weight_M,
        row_M,
        options,
        chunk,
        resolve(backend, x_MD.device.type, in_cuda_library=False),
    )
    return MlmHeadOutput(
        loss_sum=loss_sum,
        weight_sum=weight_M.sum(),
        sampled_M=sampled_M,
        correct_sum=((best_M == target_M) * weight_M).sum(),
        sampled_correct_sum=((sampled_M == target_M) * weight_M).sum(),
    )


def _product_dtype(weight_VD: torch.Tensor) -> torch.dtype:
    """Return the dtype of products with a weight: its own or, for fp32 under autocast on a GPU, that of autocast.

    Products of fp32 are many times slower on a GPU.
    """
    under_autocast = weight_VD.device.type != "cpu" and torch.is_autocast_enabled("cuda")  # "meta" counts as a GPU
    if under_autocast and weight_VD.dtype == torch.float32:
        return torch.get_autocast_dtype("cuda")
    return weight_VD.dtype


def _without_small_rest(num_rows: int, chunk: int) -> int:
    """Return how many rows to compute at a time: `chunk`, or more if less than an eighth of it would be left over.

    ELECTRA-Large has 130 slots for masked tokens in each row of the corpus, so 32 such rows give 4,160 here: one chunk
    instead of chunks of 4,096 and 64. A small chunk is inefficient on a GPU, because each chunk reads the whole table
    and adds to its whole gradient.
    """
    num_whole_chunks, rest = divmod(num_rows, chunk)
    if num_whole_chunks == 0 or rest == 0 or rest * 8 >= chunk:
        return chunk
    return -(-num_rows // num_whole_chunks)  # rounded up


def row_pass_reference(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    """Compute loss, most likely token and sample of each of M rows of logits, by the C library or by torch.

    The C library is used for fp32 logits on a CPU where the library was built; it agrees with torch to fp32 rounding.

    Args:
        logits_MV: Logits without bias, padded columns at the end. With `options.with_gradient`, overwritten by
            their gradient, (softmax - onehot) * weight, with 0 in the padded columns.
        bias_V: Bias of the `options.vocab_size` tokens that exist.
        target_M: int64 true tokens.
        weight_M: Weights of the rows in the gradient; their dtype, fp32 or fp64, is that of the computation.
        row_M: int64 row numbers within the global batch.
        options: Seed, step and switches.
    """
    on_cpu = logits_MV.device.type == "cpu"
    is_fp32 = logits_MV.dtype == weight_M.dtype == torch.float32
    if cpu_library.row_pass is None or not on_cpu or not is_fp32:
        return _row_pass_torch(logits_MV, bias_V, target_M, weight_M, row_M, options)
    arrays = (tensor.detach().numpy() for tensor in (logits_MV, bias_V.float(), target_M, weight_M, row_M))
    loss_M, best_M, sampled_M = cpu_library.row_pass(
        *arrays,
        key=(options.seed, int(Purpose.SAMPLE), options.step),
        temperature=float(options.temperature),
        disallow_correct=options.disallow_correct,
        with_gradient=options.with_gradient,
        num_threads=torch.get_num_threads(),
    )
    return RowStats(torch.from_numpy(loss_M), torch.from_numpy(best_M), torch.from_numpy(sampled_M))


def _row_pass_torch(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    """Compute `row_pass_reference` in torch, some rows at a time; this defines what the C and Triton code compute."""
    rows_per_block = block_rows(logits_MV)
    stats = RowStats(
        loss_M=torch.empty_like(weight_M), best_M=torch.empty_like(target_M), sampled_M=torch.empty_like(target_M)
    )
    for begin in range(0, len(logits_MV), rows_per_block):
        rows = slice(begin, begin + rows_per_block)
        # The block's results are copied at once, and no variable holds them: small tensors that live between large
        # temporaries would fragment the heap (1 GB in a chunk).
        _copy_rows(
            stats, rows, _row_block(logits_MV[rows], bias_V, target_M[rows], weight_M[rows], row_M[rows], options)
        )
    return stats


def _copy_rows(stats: RowStats, rows: slice, block: RowStats) -> None:
    stats.loss_M[rows] = block.loss_M
    stats.best_M[rows] = block.best_M
    stats.sampled_M[rows] = block.sampled_M


def _row_block(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    """Compute loss, most likely and sampled token of each row; overwrite the logits by their gradient if wanted."""
    compute_dtype = weight_M.dtype
    z_MV = logits_MV[:, : options.vocab_size].to(compute_dtype) + bias_V.to(compute_dtype)
    forbidden_M = target_M if options.disallow_correct else None
    sampled_M = sample_reference(z_MV, options.seed, options.step, row_M, options.temperature, forbidden_M)

    # Cross-entropy: log(sum of exp(z)) - z_target. The largest logit is subtracted first, so that exp cannot overflow.
    target_M1 = target_M[:, None]
    z_target_M = z_MV.gather(1, target_M1)[:, 0]
    top_M, best_M = z_MV.max(1)
    exp_MV = z_MV.sub_(top_M[:, None]).exp_()  # in the memory of z_MV, which is not needed any more
    sum_M = exp_MV.sum(1)
    loss_M = sum_M.log() + (top_M - z_target_M)

    if options.with_gradient:
        # softmax - onehot is computed before the rounding to the logits' dtype, so that a confident row keeps its
        # gradient.
        softmax_MV = exp_MV.div_(sum_M[:, None])
        minus_one_M1 = -torch.ones_like(z_target_M)[:, None]
        difference_MV = softmax_MV.scatter_add_(1, target_M1, minus_one_M1)
        logits_MV[:, : options.vocab_size] = difference_MV.mul_(weight_M[:, None])
        logits_MV[:, options.vocab_size :] = 0
    return RowStats(loss_M, best_M, sampled_M)


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Turn random bits, int64 in [0, 2**32), into standard Gumbel noise, fp32 of the same shape, always finite.

    The noise is -log(E) for a draw E from the exponential distribution. The relative error of E against exact
    arithmetic on the same bits is below 4e-7.
    """
    u = bits.float().add_(0.5).mul_(2.0**-32)
    # u + u^2/2 + u^3/3 + u^4/4 + u^5/5: at u = 1/32, the next term is 5e-9 of the sum.
    series = u.mul(1 / 5).add_(1 / 4).mul_(u).add_(1 / 3).mul_(u).add_(1 / 2).mul_(u).add_(1.0).mul_(u)
    # The complement of the bits gives 1 - u without a subtraction, which would cancel digits where u is near 1.
    one_minus_u = (_MAX_BITS - bits).float().add_(0.5).mul_(2.0**-32)
    exponential = torch.where(bits < SERIES_BELOW, series, one_minus_u.log_().neg_())
    return exponential.log_().neg_()


def sample_reference(
    logits_MV: torch.Tensor,
    seed: int,
    step: int,
    row_M: torch.Tensor,
    temperature: float = 1.0,
    forbidden_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row from softmax(logits / temperature), int64 [M], in plain PyTorch.

    `row_M` are the row numbers within the global batch, in [0, 2**32). Token `forbidden_M[m]` is not drawn in row m.
    The computation is in fp32, or in fp64 for fp64 logits. Temporaries are as large as the logits, so pass at most
    `block_rows` rows at a time.
    """
    vocab_size = logits_MV.shape[1]
    score_dtype = torch.promote_types(logits_MV.dtype, torch.float32)
    bits_MV = bits_grid(seed, Purpose.SAMPLE, step, row_M, num_positions=vocab_size)
    score_MV = gumbel_from_bits(bits_MV).to(score_dtype)
    score_MV += logits_MV * (1.0 / temperature)
    if forbidden_M is not None:
        score_MV.scatter_(1, forbidden_M[:, None], -torch.inf)
    return score_MV.argmax(1)


def block_rows(logits_MV: torch.Tensor) -> int:
    """Return how many rows of logits to sample at a time, at least 1, so that temporary tensors stay small."""
    # On a CPU, malloc reuses temporaries of this size, while larger ones cause page faults every time. On a GPU, the
    # temporaries of this many logits take 1 GB.
    logits_per_block = 2**16 if logits_MV.device.type == "cpu" else 2**24
    logits_per_row = max(1, logits_MV.shape[1])
    return max(1, logits_per_block // logits_per_row)


class _MlmHead(torch.autograd.Function):
    """Loss and samples of the masked-token head; gradients are computed in forward, because only then logits exist."""

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
        """Return the loss sum, the most likely tokens and the drawn tokens; `bias_V` has `vocab_size` entries."""
        on_cpu = x_MD.device.type == "cpu"
        compute_dtype = torch.promote_types(x_MD.dtype, torch.float32) if on_cpu else x_MD.dtype
        sum_dtype = weight_M.dtype
        x_MD = x_MD.to(compute_dtype)
        table_VD = weight_VD.to(compute_dtype)
        num_rows = len(x_MD)
        rows_in_buffer = max(min(chunk, num_rows), _LEAST_ROWS_CPU)
        logits_buffer = x_MD.new_empty(rows_in_buffer, len(table_VD))  # reused by every chunk
        row_pass: Callable[..., RowStats] = row_pass_reference
        if backend == "triton":
            from electra_kernels.triton import mlm_head as kernels

            row_pass = kernels.row_pass
        if options.with_gradient:
            grad_x_MD = torch.empty_like(x_MD)
            grad_weight_VD = torch.zeros_like(table_VD, dtype=sum_dtype)
            grad_bias_V = torch.zeros(len(table_VD), dtype=sum_dtype, device=x_MD.device)

        stats = []
        for begin in range(0, num_rows, chunk):
            rows = slice(begin, min(begin + chunk, num_rows))
            logits_MV = _logits(x_MD[rows], table_VD, logits_buffer, on_cpu)
            stats.append(row_pass(logits_MV, bias_V, target_M[rows], weight_M[rows], row_M[rows], options))
            if options.with_gradient:
                grad_logits_MV = logits_MV  # the row pass has overwritten the logits by their gradient
                torch.mm(grad_logits_MV, table_VD, out=grad_x_MD[rows])
                add_product(grad_weight_VD, grad_logits_MV.t(), x_MD[rows])
                grad_bias_V += grad_logits_MV.sum(0, dtype=sum_dtype)

        loss_M, best_M, sampled_M = (torch.cat(of_chunks) for of_chunks in zip(*stats, strict=True))
        if options.with_gradient:
            ctx.save_for_backward(grad_x_MD, grad_weight_VD, grad_bias_V[: len(bias_V)])
        ctx.mark_non_differentiable(best_M, sampled_M)
        # Rows of weight 0 are left out, not multiplied: their loss may be inf or nan.
        loss_sum = torch.where(weight_M > 0, loss_M * weight_M, 0).sum()
        return loss_sum, best_M, sampled_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # In place: the gradient of the table is as large as the table in fp32. Autograd reports a second backward pass
        # as an error, and casts each gradient to the precision of its input.
        grads = [grad.mul_(grad_loss) for grad in ctx.saved_tensors]
        return *grads, None, None, None, None, None, None  # targets to backend have no gradient


def _logits(x_MD: torch.Tensor, table_VD: torch.Tensor, buffer: torch.Tensor, on_cpu: bool) -> torch.Tensor:
    """Write the logits x W^T into `buffer` and return the rows written; on a CPU x is padded to at least 8 rows."""
    num_rows, num_features = x_MD.shape
    num_padding = _LEAST_ROWS_CPU - num_rows
    if on_cpu and num_padding > 0:
        x_MD = torch.cat([x_MD, x_MD.new_zeros(num_padding, num_features)])
    torch.mm(x_MD, table_VD.t(), out=buffer[: len(x_MD)])
    return buffer[:num_rows]
