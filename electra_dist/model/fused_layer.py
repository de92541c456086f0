"""Compute matrix products, and what a transformer layer does before and after attention as two autograd functions.

`QkvProduct` gives query, key and value by one product. A layer reads its input twice: in this product and in the
residual connection. As separate operations, autograd would add the two gradients in a pass of its own over memory. So
the function returns its input as a second result, and its backward pass computes `residual's gradient + product's
gradient x W` as one product.

`AfterAttention` is the rest of the layer: the output product of attention, dropout + residual + LayerNorm, the
feed-forward network (product, GELU, product), and dropout + residual + LayerNorm again. Its backward pass is written
by hand. The next product adds a residual's gradient in place, and the backward passes of the norms and of GELU give
the sums for the biases. For the backward pass the original parameters are kept, not casts of them, so that ZeRO-3 may
partition them in between.

Guarantee: up to rounding, the values are those of `EncoderLayer.compose`, the definition with which tests compare. The
result of `linear` is that of torch's `F.linear`. On CPUs without AMX or AVX512-BF16, products of bf16 operands are
summed in fp32 and rounded once, forward and backward: torch's own bf16 products are 4 to 20 times slower there.

Shapes: T tokens, H hidden, I width of the feed-forward network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.layer_passes import TokenSums, gelu_gradient, norm_backward, norm_forward
from electra_kernels.operation_types import LayerDropout
from electra_kernels.products import add_product
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

# Whether this CPU has AMX or AVX512-BF16 and torch uses them. A torch without oneDNN lacks the operator that asks.
HAS_BF16_PRODUCTS: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear(nn.Linear):
    """nn.Linear, with the same parameter names, that computes its product with `linear` of this module."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and hasattr(self.weight, "gradient_sum"):
            product: torch.Tensor = _ProductIntoSum.apply(x, self.weight, self.bias)
            return product
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b, [..., out], as `F.linear` does, in the dtype of `x` or of autocast."""
    if not _emulates_bf16(x):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        # Under autocast the operands may be fp32. Rounding them to bf16 first gives the operands of a bf16 product.
        x = x.bfloat16().float()
        weight = weight.bfloat16().float()
        if bias is not None:
            bias = bias.bfloat16().float()
        return F.linear(x, weight, bias).bfloat16()


def input_gradient(
    grad_TO: torch.Tensor,
    weight_OI: torch.Tensor,
    other_grad_TI: torch.Tensor | None = None,
    out_TI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the input of `linear`, [T, in]: `grad_TO` @ `weight_OI` + `other_grad_TI`.

    `other_grad_TI` is a gradient that the input has from elsewhere, such as a residual connection. It is added inside
    the product, and the sum is rounded once. All arguments have one dtype. The result may overwrite `other_grad_TI`,
    or `out_TI` without it, so that no memory is allocated and nothing is copied.
    """
    if _emulates_bf16(grad_TO):
        with torch.autocast("cpu", enabled=False):
            other_in_fp32 = None if other_grad_TI is None else other_grad_TI.float()
            return input_gradient(grad_TO.float(), weight_OI.float(), other_in_fp32).bfloat16()
    if other_grad_TI is None:
        return torch.mm(grad_TO, weight_OI, out=out_TI)
    return other_grad_TI.addmm_(grad_TO, weight_OI)


class GradientSum(NamedTuple):
    """Place in which the gradients of a weight are added up in fp32, instead of being handed to autograd.

    It is the attribute `gradient_sum` of a parameter; a weight without it is left to autograd.
    """

    total_OI: torch.Tensor  # fp32
    added: Callable[[], None]  # to be called after each addition


def weight_gradient(
    grad_TO: torch.Tensor, x_TI: torch.Tensor, gradient_sum: GradientSum | None = None
) -> torch.Tensor | None:
    """Return grad^T x, the gradient of the weight of `linear`, [out, in]. Both arguments have the same dtype.

    With `gradient_sum` the product is added to that sum without being rounded, and None is returned.
    """
    if gradient_sum is not None:
        add_product(gradient_sum.total_OI, grad_TO.t(), x_TI)
        gradient_sum.added()
        return None
    if _emulates_bf16(grad_TO):
        with torch.autocast("cpu", enabled=False):
            return torch.mm(grad_TO.float().t(), x_TI.float()).bfloat16()
    return torch.mm(grad_TO.t(), x_TI)


def gradient_sums(*weights: torch.Tensor) -> tuple[GradientSum | None, ...]:
    """Return for each weight the sum to which the backward pass adds its gradient, or None if autograd gets it."""
    return tuple(getattr(weight, "gradient_sum", None) if weight.requires_grad else None for weight in weights)


class _ProductIntoSum(torch.autograd.Function):
    """Product with a weight whose gradient is added to its `gradient_sum` and not handed to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        (ctx.weight_sum,) = gradient_sums(weight)
        ctx.has_bias = bias is not None
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_TO = grad.flatten(0, -2)
        grad_weight = weight_gradient(grad_TO, x.flatten(0, -2), ctx.weight_sum)
        grad_x = input_gradient(grad_TO, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, grad_TO.sum(0) if ctx.has_bias else None


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of `x` is computed: that of autocast, or else the dtype of `x`."""
    device_type = x.device.type
    has_autocast = torch.amp.is_autocast_available(device_type)  # `meta` has none
    if has_autocast and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def _emulates_bf16(x: torch.Tensor) -> bool:
    """Return whether a product of `x` would be in bf16 on a CPU without bf16 instructions, where fp32 is faster."""
    if x.device.type != "cpu" or HAS_BF16_PRODUCTS:
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return x.dtype == torch.bfloat16


class QkvProduct(torch.autograd.Function):
    """Product that gives query, key and value; it also returns its input, for the residual connection."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sums_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return query, key and value, [T, 3 H], and the input for the residual, [T, H], in the product's dtype.

        Without `sums_bias` the backward pass returns no gradient of the bias, because attention computes it.
        """
        dtype = product_dtype(hidden_TH)
        # The first layer's input is fp32 under autocast; the residual connection continues in the product's dtype.
        residual_TH = hidden_TH.to(dtype)
        ctx.save_for_backward(residual_TH, weight)
        (ctx.weight_sum,) = gradient_sums(weight)
        ctx.sums_bias = sums_bias
        return linear(residual_TH, weight.to(dtype), bias.to(dtype)), residual_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_qkv: torch.Tensor, grad_residual_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the states, the weight and, with `sums_bias`, the bias."""
        hidden_TH, weight = ctx.saved_tensors
        grad_hidden_TH = input_gradient(grad_qkv, weight.to(grad_qkv.dtype), grad_residual_TH)
        grad_weight = weight_gradient(grad_qkv, hidden_TH, ctx.weight_sum)
        return grad_hidden_TH, grad_weight, grad_qkv.sum(0) if ctx.sums_bias else None, None


class Parameters(NamedTuple):
    """Parameters of a layer that are used after attention, in the order of their use."""

    out_weight: torch.Tensor  # [H, H]
    out_bias: torch.Tensor  # [H]
    attention_norm_weight: torch.Tensor  # [H]
    attention_norm_bias: torch.Tensor  # [H]
    expand_weight: torch.Tensor  # [I, H]
    expand_bias: torch.Tensor  # [I]
    contract_weight: torch.Tensor  # [H, I]
    contract_bias: torch.Tensor  # [H]
    output_norm_weight: torch.Tensor  # [H]
    output_norm_bias: torch.Tensor  # [H]


class Settings(NamedTuple):
    """Options of the two places in a layer where LayerNorm(residual + dropout(x)) is computed."""

    eps: float  # added to the variance
    attention_dropout: LayerDropout  # on the output of attention
    output_dropout: LayerDropout  # on the output of the feed-forward network


class AfterAttention(torch.autograd.Function):
    """Output product of attention, feed-forward network, and the dropout + residual + LayerNorm after each."""

    @staticmethod
    def forward(
        ctx: Any, context_TH: torch.Tensor, residual_TH: torch.Tensor, settings: Settings, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Return the states after a layer, [T, H]; `context_TH` is the attention output before its output projection.

        `residual_TH` is the layer's input. Both tensors are contiguous and of one dtype. Under autocast the
        parameters, in the order of `Parameters`, may have another dtype.
        """
        used = _in_dtype_of_products(Parameters(*parameters), context_TH.dtype)
        attended_TH = linear(context_TH, used.out_weight, used.out_bias)
        normed_TH, attention_kept = norm_forward(
            attended_TH,
            residual_TH,
            used.attention_norm_weight,
            used.attention_norm_bias,
            settings.eps,
            settings.attention_dropout,
        )
        expanded_TI = linear(normed_TH, used.expand_weight, used.expand_bias)
        activated_TI = F.gelu(expanded_TI)
        contracted_TH = linear(activated_TI, used.contract_weight, used.contract_bias)
        states_TH, output_kept = norm_forward(
            contracted_TH,
            normed_TH,
            used.output_norm_weight,
            used.output_norm_bias,
            settings.eps,
            settings.output_dropout,
        )
        ctx.save_for_backward(
            context_TH, normed_TH, expanded_TI, activated_TI, *parameters, *attention_kept, *output_kept
        )
        ctx.settings = settings
        originals = Parameters(*parameters)
        ctx.weight_sums = gradient_sums(originals.out_weight, originals.expand_weight, originals.contract_weight)
        return states_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients. This overwrites saved tensors, so it can run once; torch rejects a second call."""
        context_TH, normed_TH, expanded_TI, activated_TI, *saved = ctx.saved_tensors
        num_parameters = len(Parameters._fields)
        parameters = Parameters(*saved[:num_parameters])
        used = _in_dtype_of_products(parameters, grad_TH.dtype)
        kept = saved[num_parameters:]
        attention_kept = tuple(kept[: len(kept) // 2])
        output_kept = tuple(kept[len(kept) // 2 :])
        settings: Settings = ctx.settings
        out_sum, expand_sum, contract_sum = ctx.weight_sums
        # Widths of the sums in the order of the calls below. For the last norm: its weight, its bias, and the bias of
        # the product before it. Then the bias before GELU, and the same three sums for the norm after attention.
        hidden, intermediate = len(used.out_bias), len(used.expand_bias)
        widths = [hidden, hidden, hidden, intermediate, hidden, hidden, hidden]
        sums = TokenSums(settings.output_dropout.backend, grad_TH, widths)

        grad_contracted_TH, grad_normed_TH = norm_backward(
            grad_TH.contiguous(),
            output_kept,
            used.output_norm_weight,
            used.output_norm_bias,
            settings.output_dropout,
            sums,
        )
        grad_contract_weight = weight_gradient(grad_contracted_TH, activated_TI, contract_sum)
        # This gradient is one of the largest tensors of the pass. It overwrites the activations, which have been used.
        grad_activated_TI = input_gradient(grad_contracted_TH, used.contract_weight, out_TI=activated_TI)
        grad_expanded_TI = gelu_gradient(grad_activated_TI, expanded_TI, sums)
        grad_expand_weight = weight_gradient(grad_expanded_TI, normed_TH, expand_sum)
        grad_normed_TH = input_gradient(grad_expanded_TI, used.expand_weight, grad_normed_TH)
        grad_attended_TH, grad_residual_TH = norm_backward(
            grad_normed_TH,
            attention_kept,
            used.attention_norm_weight,
            used.attention_norm_bias,
            settings.attention_dropout,
            sums,
        )
        grad_out_weight = weight_gradient(grad_attended_TH, context_TH, out_sum)
        grad_context_TH = input_gradient(grad_attended_TH, used.out_weight)

        # The totals come in the order of the calls above.
        totals = sums.totals(parameters.out_bias.dtype)
        grad_output_norm_weight, grad_output_norm_bias, grad_contract_bias, grad_expand_bias = totals[:4]
        grad_attention_norm_weight, grad_attention_norm_bias, grad_out_bias = totals[4:]
        grads_after_attention = (grad_out_weight, grad_out_bias, grad_attention_norm_weight, grad_attention_norm_bias)
        grads_of_expand = (grad_expand_weight, grad_expand_bias)
        grads_after_expand = (grad_contract_weight, grad_contract_bias, grad_output_norm_weight, grad_output_norm_bias)
        grads = (*grads_after_attention, *grads_of_expand, *grads_after_expand)  # in the order of `Parameters`
        return grad_context_TH, grad_residual_TH, None, *grads


def _in_dtype_of_products(parameters: Parameters, dtype: torch.dtype) -> Parameters:
    """Cast the weights and biases of the matrix products to `dtype`; without autocast they have it already."""
    if parameters.out_weight.dtype == dtype:
        return parameters
    return parameters._replace(
        out_weight=parameters.out_weight.to(dtype),
        out_bias=parameters.out_bias.to(dtype),
        expand_weight=parameters.expand_weight.to(dtype),
        expand_bias=parameters.expand_bias.to(dtype),
        contract_weight=parameters.contract_weight.to(dtype),
        contract_bias=parameters.contract_bias.to(dtype),
    )
