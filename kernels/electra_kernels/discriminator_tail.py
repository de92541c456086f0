"""Discriminator tail: bias, GELU, dot product with the output vector, sigmoid cross-entropy, and the step's counts.

Guarantee: everything after the dense layer's matrix product in one pass over its output, in fp32, with loss, logits
and the four counts of the confusion table; backward in one more pass that keeps no activation but that output. GELU
is the exact one (erf). Positions of mask 0 add nothing to any sum and get no gradient.

How: a is the dense output plus bias; z = out_weight . gelu(a) + out_bias; loss = softplus(z) - label * z. Backward
forms a again. The Triton kernel gives each program a strip of rows and keeps the parameters' gradients in registers,
so they are summed in a fixed order, without atomics.

Cost at T = 32768, H = 1024 in bf16: 67 MB forward, 134 MB backward: 0.05 ms at 4.3 TB/s.

Where it stops: the dense layer's matrix product stays with cuBLAS.

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from electra_kernels.backend import resolve


class RtdOutput(NamedTuple):
    """Sums over the T tokens; only `loss_sum` carries a gradient. Everything but the logits is a scalar."""

    loss_sum: torch.Tensor
    mask_sum: torch.Tensor
    logits_T: torch.Tensor
    replaced_correct: torch.Tensor
    replaced_count: torch.Tensor
    original_correct: torch.Tensor
    original_count: torch.Tensor


def rtd_loss(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    backend: str = "auto",
) -> RtdOutput:
    """Replaced-token detection from the dense layer's output.

    Args:
        dense_TH: the dense layer's matrix product WITHOUT its bias, any floating precision.
        bias_H: that bias.
        out_weight_H: weights of the output unit.
        out_bias: bias of the output unit, one element.
        label_T: bool or number, non-zero where the token was replaced.
        mask_T: bool or number, the weight of each token in the loss; 0 on padding.
        backend: see `backend.resolve`.

    Returns:
        fp32 (fp64 for fp64 input) sums. A token counts as called replaced where its logit is above 0; the counts are
        weighted by `mask_T`.
    """
    compute = torch.promote_types(dense_TH.dtype, torch.float32)
    label_T, mask_T = label_T.to(compute), mask_T.to(compute)
    arguments = (dense_TH, bias_H, out_weight_H, out_bias.reshape(()), label_T, mask_T)
    implementation = resolve(backend, dense_TH.device.type)
    if implementation == "reference":
        loss_T, logits_T = rtd_losses_reference(*arguments)
    else:
        if implementation == "triton":
            from electra_kernels.triton import discriminator_tail as passes
        else:
            from electra_kernels.native import discriminator_tail as passes  # type: ignore[no-redef]
        loss_T, logits_T = _RtdLosses.apply(*arguments, passes)
    return _sums(loss_T, logits_T.detach(), label_T, mask_T)


def rtd_losses_reference(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: masked loss and logit of every token, [T] each, in `label_T`'s precision."""
    compute = label_T.dtype
    activation_TH = F.gelu(dense_TH.to(compute) + bias_H.to(compute))
    logits_T = activation_TH @ out_weight_H.to(compute) + out_bias.to(compute)
    loss_T = F.binary_cross_entropy_with_logits(logits_T, label_T, reduction="none")
    return loss_T * mask_T, logits_T


class _RtdLosses(torch.autograd.Function):
    """Both passes by a module that has `forward_pass` and `backward_pass`: Triton's or CUDA's."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, passes = arguments
        dense_TH, bias_H, out_weight_H, out_bias = (tensor.contiguous() for tensor in tensors[:4])
        label_T, mask_T = (tensor.float().contiguous() for tensor in tensors[4:])
        loss_T, logits_T = passes.forward_pass(dense_TH, bias_H, out_weight_H, out_bias, label_T, mask_T)
        ctx.save_for_backward(dense_TH, bias_H, out_weight_H, label_T, mask_T, logits_T)
        ctx.passes = passes
        ctx.mark_non_differentiable(logits_T)
        return loss_T, logits_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.passes.backward_pass(*ctx.saved_tensors, upstream_T.float().contiguous())
        return *grads, None, None, None


def _sums(loss_T: torch.Tensor, logits_T: torch.Tensor, label_T: torch.Tensor, mask_T: torch.Tensor) -> RtdOutput:
    called_T = logits_T > 0
    replaced_T, original_T = label_T * mask_T, (1 - label_T) * mask_T
    return RtdOutput(
        loss_sum=loss_T.sum(),
        mask_sum=mask_T.sum(),
        logits_T=logits_T,
        replaced_correct=(replaced_T * called_T).sum(),
        replaced_count=replaced_T.sum(),
        original_correct=(original_T * ~called_T).sum(),
        original_count=original_T.sum(),
    )
