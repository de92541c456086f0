"""Fuse what a layer computes between its matrix products: dropout + residual + LayerNorm, and gradients with sums.

A layer's own autograd function (`electra_dist/model/fused_layer.py`) calls `norm_forward`, `norm_backward` and
`gelu_gradient`, outside autograd. The two backward passes also sum over all tokens, for the gradients of parameters.
Under Triton each program of a kernel sums over a strip of tokens; the strips are then added in a fixed order.

Guarantee, norm: the result is `layer_norm(residual + dropout(x))`, computed in fp32 and rounded once. Which elements
are dropped depends on the seed (the model passes one for each tower), the step, the row's number in the global batch,
the site (which sub-layer of the tower), and the position and column in the row. It does not depend on batch split,
rank or restart, whereas torch's dropout draws the elements of a whole micro-batch from one random stream. Backward
draws the same bits again, so no mask is stored.

Why the norm is fused, in bytes moved for each element in bf16, forward and backward together: eager torch moves 30
(dropout 5 and 5, add 6, LayerNorm 4 and 10). torch.compile moves 22 (9 and 13), because it stores a byte of mask and
reads the gradients once more to sum those of the parameters. This operation moves 16 (6 and 10).

In Triton, backward computes residual + dropout(x) again from both inputs. To keep the inputs costs no more memory than
to keep that sum, because the sub-layer keeps its residual in any case. In an eager layer the reference keeps the sum
and the factors of dropout, which take longer to compute again on a CPU.

Cost at 32768 x 1024 in bf16: 201 MB forward, 336 MB backward. On a CPU: 1 ns an element for the bits.

`dropout_add_norm` is a custom operator, which torch.compile treats as opaque. The values of its key, a tensor, are not
part of a compiled graph, so that one graph serves every layer of a tower and every step; Python integers would become
constants of the graph.

Guarantee, `gelu_gradient`: the gradient is that of the exact GELU (erf), and the sum over the tokens, the gradient of
the bias before GELU, is in fp32 or wider. The Triton kernel adds the values before they are rounded to the dtype of
the gradient, the reference the rounded ones.

Why GELU's gradient is fused: torch's and a sum for the bias read and write 2 * 3 + 2 bytes an element in bf16. In
Triton, one kernel moves 6 and writes the gradient over its input, so no memory of that size is allocated. cublasLt
could apply GELU while it writes the product, but it computes the approximation by tanh, and the paper's GELU is exact.

Limits: H is a multiple of 4; the number of the site within the tower times S * H is below 2**34. On a CPU the
operator's backward pass computes residual + dropout(x) again.

Shapes: B rows, S tokens, T = B * S, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from electra_kernels.backend_choice import resolve
from electra_kernels.keyed_random import Purpose, keep_grid
from electra_kernels.operation_types import SITES, LayerDropout


class TokenSums:
    """Gradients of a layer's biases and norms, each a sum over all tokens, which the layer's backward passes collect.

    Under Triton each program of a kernel writes its partial sums as one row of a common buffer, so that a single
    launch adds up the rows and gives all gradients.
    """

    partials_PC: torch.Tensor | None  # fp32 buffer of the kernels; None for the plain-PyTorch reference

    def __init__(self, backend: str, grad: torch.Tensor, widths: Sequence[int]) -> None:
        """Allocate the buffer for sums of these widths, which will be collected in this order.

        A width is the number of features that one sum has. Shape and device of `grad`, the gradient of a LayerNorm's
        output, decide how many rows of partial sums the buffer has; its values are not read.
        """
        self._widths = list(widths)
        self._sums: list[torch.Tensor] = []
        self._next_column = 0
        self.partials_PC = None
        if backend == "triton":
            from electra_kernels.triton.layer_passes import num_strips

            hidden = grad.shape[-1]
            strips = num_strips(grad.numel() // hidden, hidden, grad.device)
            self.partials_PC = torch.empty(strips, sum(widths), device=grad.device)

    def add(self, *sums: torch.Tensor) -> None:
        """Collect gradients of parameters that the plain-PyTorch reference has summed over all tokens."""
        self._sums += sums

    def take_columns(self, width: int) -> int:
        """Reserve the next `width` columns of the buffer of partial sums for a kernel; return the first's index."""
        first_column = self._next_column
        self._next_column += width
        return first_column

    def totals(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return the collected gradients in `dtype`, in the order of collection; under Triton they share memory."""
        if self.partials_PC is None:
            return [each.to(dtype) for each in self._sums]
        assert self._next_column == sum(self._widths), (
            f"{self._next_column} of {sum(self._widths)} columns are written"
        )
        from electra_kernels.triton.strip_sums import sum_of_strips

        return sum_of_strips(self.partials_PC, dtype).split(self._widths)


@torch.library.custom_op("electra::dropout_add_norm", mutates_args=())
def dropout_add_norm(
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    key_3: torch.Tensor,
    site: int,
    probability: float,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return LayerNorm(residual + dropout(x)), contiguous in the dtype of `x_BSH`, and statistics for backward.

    `x_BSH` is the output of a sub-layer and `residual_BSH` its input, of one dtype. The first four arguments have
    gradients, but no second derivatives. The computation is in fp32 (fp64 for fp64 input).

    Args:
        row_B: int64 row numbers within the global batch.
        key_3: int64 seed, step and number of the layer; on the device under Triton, else on the host.
        site: Place within the layer, in [0, SITES).
        probability: Chance of an element to be dropped; 0 in evaluation.
        backend: See `backend_choice`.

    Returns:
        The normed states, and mean and variance (with eps) of each token, fp32 [2, T]; the reference keeps no
        statistics and returns [2, 0].
    """
    dropout = _dropout(x_BSH, row_B, key_3, site, probability, backend)
    x_BSH = x_BSH.contiguous()
    residual_BSH = residual_BSH.contiguous()
    if dropout.backend == "triton":
        from electra_kernels.triton.layer_passes import forward_pass

        return forward_pass(x_BSH, residual_BSH, weight_H, bias_H, eps, dropout)
    out_BSH, _ = reference_forward(x_BSH, residual_BSH, weight_H, bias_H, eps, dropout)
    return out_BSH, _empty_statistics(x_BSH, backend)


@dropout_add_norm.register_fake
def _dropout_add_norm_shapes(x_BSH: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    backend = rest[-1]
    out_BSH = torch.empty_like(x_BSH, memory_format=torch.contiguous_format)
    return out_BSH, _empty_statistics(x_BSH, backend)


@torch.library.custom_op("electra::dropout_add_norm_backward", mutates_args=())
def _backward(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    statistics_2T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    key_3: torch.Tensor,
    site: int,
    probability: float,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, residual, weight and bias of `dropout_add_norm`: contiguous, in the inputs' dtypes.

    They share no storage. The arguments are those of `dropout_add_norm`, its statistics, and its output's gradient.
    """
    dropout = _dropout(x_BSH, row_B, key_3, site, probability, backend)
    x_BSH = x_BSH.contiguous()
    residual_BSH = residual_BSH.contiguous()
    kept: Kept = (x_BSH, residual_BSH, statistics_2T)
    if dropout.backend == "reference":
        # Autograd records nothing inside a custom operator, so the sum before the norm is computed again.
        _, kept = norm_forward(x_BSH, residual_BSH, weight_H, bias_H, eps, dropout)
    hidden = len(weight_H)
    sums = TokenSums(dropout.backend, grad_BSH, [hidden, hidden])
    grad_x, grad_residual = norm_backward(grad_BSH.contiguous(), kept, weight_H, bias_H, dropout, sums, in_layer=False)
    grad_weight, grad_bias = sums.totals(torch.promote_types(weight_H.dtype, torch.float32))
    # Outputs of an operator must not share storage. Without dropout the first two gradients are one tensor, and in
    # Triton the other two are parts of one.
    if grad_x.data_ptr() == grad_residual.data_ptr():
        grad_residual = grad_residual.clone()
    grad_weight = grad_weight.to(weight_H.dtype, copy=True)
    grad_bias = grad_bias.to(bias_H.dtype, copy=True)
    return grad_x, grad_residual, grad_weight, grad_bias


@_backward.register_fake
def _backward_shapes(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    statistics_2T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    inputs = (x_BSH, residual_BSH, weight_H, bias_H)
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x_BSH, residual_BSH, weight_H, bias_H, row_B, key_3, site, probability, eps, backend = inputs
    _, statistics_2T = output
    # Both are in the order in which `_backward` takes them.
    ctx.save_for_backward(x_BSH, residual_BSH, statistics_2T, weight_H, bias_H, row_B, key_3)
    ctx.options = (site, probability, eps, backend)


def _autograd_backward(ctx: Any, grad_BSH: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    grad_x, grad_residual, grad_weight, grad_bias = _backward(grad_BSH, *ctx.saved_tensors, *ctx.options)
    no_grads = [None] * 6  # row_B, key_3, site, probability, eps, backend
    return grad_x, grad_residual, grad_weight, grad_bias, *no_grads


dropout_add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)


def _dropout(
    x: torch.Tensor, row_B: torch.Tensor, key_3: torch.Tensor, site: int, probability: float, backend: str
) -> LayerDropout:
    resolved = resolve(backend, x.device.type, in_cuda_library=False)
    return LayerDropout(key_3, row_B.contiguous(), resolved, probability, site)


def _empty_statistics(x_BSH: torch.Tensor, backend: str) -> torch.Tensor:
    """Allocate mean and variance of each token: [2, T] for Triton, and [2, 0] for the reference, which keeps none."""
    num_rows, seq_len, _ = x_BSH.shape
    uses_triton = resolve(backend, x_BSH.device.type, in_cuda_library=False) == "triton"
    return x_BSH.new_empty(2, num_rows * seq_len if uses_triton else 0, dtype=torch.float32)


Kept = tuple[torch.Tensor | None, ...]  # what the forward pass of a norm keeps for its backward pass


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    eps: float,
    dropout: LayerDropout,
) -> tuple[torch.Tensor, Kept]:
    """Return LayerNorm(residual + dropout(x)) in the dtype of `x`, and the tensors that `norm_backward` needs.

    Autograd does not record this. `x` and `residual`, [B, S, H] or [T, H], are contiguous and of one dtype.
    """
    if dropout.backend == "triton":
        from electra_kernels.triton.layer_passes import forward_pass

        normed, statistics_2T = forward_pass(x, residual, weight_H, bias_H, eps, dropout)
        return normed, (x, residual, statistics_2T)
    return reference_forward(x, residual, weight_H, bias_H, eps, dropout)


def norm_backward(
    grad: torch.Tensor,
    kept: Kept,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    dropout: LayerDropout,
    sums: TokenSums,
    in_layer: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and residual in LayerNorm(residual + dropout(x)), in the dtype of contiguous `grad`.

    `kept` comes from `norm_forward`. The gradients of the LayerNorm's weight and bias, [H] each, are added to `sums`.
    With `in_layer`, so is that of a bias that was added to x, and the gradient of x may overwrite x. Without dropout,
    both returned gradients are the same tensor.
    """
    if dropout.backend == "triton":
        from electra_kernels.triton.layer_passes import backward_strips

        x, residual, statistics_2T = kept
        assert x is not None and residual is not None and statistics_2T is not None and sums.partials_PC is not None
        first_column = sums.take_columns((3 if in_layer else 2) * len(weight_H))
        return backward_strips(
            grad, x, residual, statistics_2T, weight_H, dropout, sums.partials_PC, first_column, in_layer
        )
    kept_for_backward = KeptForBackward(*kept)  # type: ignore[arg-type]
    grad_x, grad_residual, grad_weight_H, grad_bias_H = reference_backward(grad, kept_for_backward, weight_H, bias_H)
    sums.add(grad_weight_H, grad_bias_H)
    if in_layer:
        sums.add(grad_x.sum(0))
    return grad_x.to(grad.dtype), grad_residual.to(grad.dtype)


class KeptForBackward(NamedTuple):
    """What LayerNorm(residual + dropout(x)) keeps in plain PyTorch for its backward pass, in fp32 or wider."""

    summed: torch.Tensor  # residual + dropout(x), [..., H]
    mean: torch.Tensor  # of each token, [..., 1]
    inverse_deviation: torch.Tensor  # 1 / sqrt(variance + eps) of each token, [..., 1]
    keep: torch.Tensor | None  # factors of dropout, [..., H]; None if nothing is dropped


def reference_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    eps: float,
    dropout: LayerDropout,
) -> tuple[torch.Tensor, KeptForBackward]:
    """Return LayerNorm(residual + dropout(x)) in the dtype of `x`, and what `reference_backward` needs.

    This is the definition of `dropout_add_norm` in plain PyTorch; it computes in fp32 or wider.
    """
    hidden = x.shape[-1]
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    dropped = x.to(compute_dtype)
    keep = None
    if dropout.probability:
        num_rows = len(dropout.row_B)
        shape_BSH = torch.Size((num_rows, x.numel() // (num_rows * hidden), hidden))
        keep = keep_scale(shape_BSH, dropout).to(compute_dtype).view(x.shape)
        dropped = dropped * keep
    summed = dropped + residual.to(compute_dtype)
    weight_H = weight_H.to(compute_dtype)
    bias_H = bias_H.to(compute_dtype)
    normed, mean, inverse_deviation = torch.native_layer_norm(summed, [hidden], weight_H, bias_H, eps)
    return normed.to(x.dtype), KeptForBackward(summed, mean, inverse_deviation, keep)


def reference_backward(
    grad: torch.Tensor, kept: KeptForBackward, weight_H: torch.Tensor, bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of LayerNorm(residual + dropout(x)): of x, the residual, the weight and the bias.

    They are fp32 or wider. Without dropout, the gradients of x and of the residual are the same tensor object.
    """
    compute_dtype = kept.summed.dtype
    wanted_grads = [True, True, True]  # input, weight, bias
    # The gradient of the LayerNorm's input is also the gradient of the residual.
    grad_residual, grad_weight_H, grad_bias_H = torch.ops.aten.native_layer_norm_backward(
        grad.to(compute_dtype),
        kept.summed,
        list(weight_H.shape),
        kept.mean,
        kept.inverse_deviation,
        weight_H.to(compute_dtype),
        bias_H.to(compute_dtype),
        wanted_grads,
    )
    grad_x = grad_residual if kept.keep is None else grad_residual * kept.keep
    return grad_x, grad_residual, grad_weight_H, grad_bias_H


def keep_scale(shape: torch.Size, dropout: LayerDropout) -> torch.Tensor:
    """Return the factors of dropout, fp32 [B, S, H]: 0 for dropped elements, 1 / (1 - probability) for the others.

    Seed, step and a row's number in the global batch determine a sequence of random numbers. With n = S * H, a
    multiple of 4, the network's i-th place that applies dropout uses the n numbers from index i * n on, so no two
    places share one. The key, `dropout.key_3`, is read on the host.
    """
    seed, step, layer = dropout.key_3.tolist()
    site = SITES * layer + dropout.site
    _, seq_len, hidden = shape
    elements_per_row = seq_len * hidden
    factors = keep_grid(
        seed,
        Purpose.DROPOUT,
        step,
        dropout.row_B,
        num_positions=elements_per_row,
        first_position=site * elements_per_row,
        drop=dropout.probability,
    )
    return factors.view(shape)


def gelu_gradient(grad_TI: torch.Tensor, x_TI: torch.Tensor, sums: TokenSums) -> torch.Tensor:
    """Return the gradient of GELU's input `x_TI`, and collect its sum over the tokens, a bias's gradient, in `sums`.

    `grad_TI`, contiguous, is the gradient of GELU's output and may be overwritten.
    """
    if sums.partials_PC is None:
        grad_x_TI = torch.ops.aten.gelu_backward(grad_TI, x_TI)
        sums.add(grad_x_TI.sum(0, dtype=torch.promote_types(x_TI.dtype, torch.float32)))
        return grad_x_TI
    from electra_kernels.triton.layer_passes import gradient_strips

    return gradient_strips(grad_TI, x_TI, sums.partials_PC, sums.take_columns(grad_TI.shape[1]))


def join_gradients(
    query_TND: torch.Tensor, key_TND: torch.Tensor, value_TND: torch.Tensor, sum_dtype: torch.dtype, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value in one tensor, [T, 3, N, D], and its sum over the tokens, [3 H].

    The sum, in `sum_dtype`, is the gradient of the bias of the product that computed query, key and value. `backend`
    is "triton" or "reference". Under Triton one kernel reads the gradients once, and the sum is rounded only once.
    """
    if backend == "triton":
        from electra_kernels.triton import qkv_gradient

        return qkv_gradient.join_gradients(
            query_TND.contiguous(), key_TND.contiguous(), value_TND.contiguous(), sum_dtype
        )
    joined_T3ND = torch.stack((query_TND, key_TND, value_TND), 1)
    return joined_T3ND, joined_T3ND.flatten(1).sum(0).to(sum_dtype)
