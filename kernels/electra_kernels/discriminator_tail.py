"""Compute the discriminator's tail: what follows its dense layer's matrix product, up to the loss and its statistics.

Guarantee: bias, GELU, dot product with the output vector and cross-entropy are one pass over the dense output, in
fp32. The operation returns the loss, the logits, and how many replaced and original tokens are predicted correctly.
Backward is one more pass. The dense output is the only activation of size T * H that is kept for it. GELU is the exact
one (erf). Tokens with mask 0 add nothing to any sum and have no gradient.

How: a is the dense output plus bias; z = out_weight . gelu(a) + out_bias; loss = softplus(z) - label * z (ELECTRA,
Clark et al. 2020, section 2). Backward computes a again. In Triton, each program (thread block) handles several
tokens, called its strip, and keeps the strip's gradients of the parameters in registers. They are added in a fixed
order, without atomics.

Cost at T = 32768, H = 1024 in bf16: 67 MB forward, 134 MB backward; that is 0.05 ms at 4.3 TB/s.

Limits: the matrix product of the dense layer is not part of this operation; cuBLAS computes it.

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from electra_kernels.backend_choice import resolve


class RtdOutput(NamedTuple):
    """Loss, logits and confusion counts of replaced-token detection; only `loss_sum` carries a gradient.

    Every sum is a scalar weighted by the mask. A token counts as predicted "replaced" where its logit is above 0.
    """

    loss_sum: torch.Tensor  # divide by `mask_sum` for the mean
    mask_sum: torch.Tensor  # number of real tokens for a mask of 0 and 1
    logits_T: torch.Tensor  # logit of "was replaced", for each token
    replaced_correct: torch.Tensor  # replaced tokens that are predicted replaced
    replaced_count: torch.Tensor  # replaced tokens
    original_correct: torch.Tensor  # original tokens that are predicted original
    original_count: torch.Tensor  # original tokens


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
    """Compute the loss of replaced-token detection, the sigmoid cross-entropy of logits w . gelu(dense + bias) + b.

    `dense_TH` is the output of the head's dense layer without its bias; w and b are `out_weight_H` and `out_bias`,
    which has one element. These four have gradients. Labels (1 where the token was replaced) and masks (weights in
    the loss, 0 on padding) are bool or numbers. The results are fp32, or fp64 for fp64 input.
    """
    compute_dtype = torch.promote_types(dense_TH.dtype, torch.float32)
    label_T = label_T.to(compute_dtype)
    mask_T = mask_T.to(compute_dtype)
    out_bias = out_bias.reshape(())
    implementation = resolve(backend, dense_TH.device.type)
    if implementation == "reference":
        loss_T, logits_T = rtd_losses_reference(dense_TH, bias_H, out_weight_H, out_bias, label_T, mask_T)
    else:
        passes = _import_passes(implementation)
        loss_T, logits_T = _RtdLosses.apply(dense_TH, bias_H, out_weight_H, out_bias, label_T, mask_T, passes)
    return _sums(loss_T, logits_T.detach(), label_T, mask_T)


def rtd_loss_of_logits(logits_T: torch.Tensor, label_T: torch.Tensor, mask_T: torch.Tensor) -> RtdOutput:
    """Compute the results of `rtd_loss` from fp32 or fp64 logits of "was replaced", in plain PyTorch on every device.

    Use it for a head whose last layers differ from those that `rtd_loss` computes. All have the same shape.
    """
    label_T = label_T.to(logits_T.dtype)
    mask_T = mask_T.to(logits_T.dtype)
    loss_T = F.binary_cross_entropy_with_logits(logits_T, label_T, reduction="none") * mask_T
    return _sums(loss_T, logits_T.detach(), label_T, mask_T)


def _import_passes(implementation: str) -> Any:
    """Import the module that runs the "triton" or "cuda" kernels; late, because a machine may lack Triton."""
    if implementation == "triton":
        from electra_kernels.triton import discriminator_tail as triton_passes

        return triton_passes
    from electra_kernels.native import discriminator_tail as cuda_passes

    return cuda_passes


def rtd_losses_reference(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss, times its mask, and logit, in plain PyTorch: the definition that kernels must meet.

    Labels, masks, computation and results are all in one dtype, fp32 or fp64.
    """
    compute_dtype = label_T.dtype
    activation_TH = F.gelu(dense_TH.to(compute_dtype) + bias_H.to(compute_dtype))
    logits_T = activation_TH @ out_weight_H.to(compute_dtype) + out_bias.to(compute_dtype)
    loss_T = F.binary_cross_entropy_with_logits(logits_T, label_T, reduction="none")
    return loss_T * mask_T, logits_T


class _RtdLosses(torch.autograd.Function):
    """Each token's loss and logit by Triton or CUDA kernels; of size T * H, backward needs the dense output only."""

    @staticmethod
    def forward(
        ctx: Any,
        dense_TH: torch.Tensor,
        bias_H: torch.Tensor,
        out_weight_H: torch.Tensor,
        out_bias: torch.Tensor,
        label_T: torch.Tensor,
        mask_T: torch.Tensor,
        passes: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dense_TH = dense_TH.contiguous()
        bias_H = bias_H.contiguous()
        out_weight_H = out_weight_H.contiguous()
        label_T = label_T.float().contiguous()
        mask_T = mask_T.float().contiguous()
        loss_T, logits_T = passes.forward_pass(dense_TH, bias_H, out_weight_H, out_bias.contiguous(), label_T, mask_T)
        ctx.save_for_backward(dense_TH, bias_H, out_weight_H, label_T, mask_T, logits_T)
        ctx.passes = passes
        ctx.mark_non_differentiable(logits_T)
        return loss_T, logits_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.passes.backward_pass(*ctx.saved_tensors, upstream_T.float().contiguous())
        grad_dense_TH, grad_bias_H, grad_out_weight_H, grad_out_bias = grads
        # Label, mask and module have no gradient.
        return grad_dense_TH, grad_bias_H, grad_out_weight_H, grad_out_bias, None, None, None


def _sums(loss_T: torch.Tensor, logits_T: torch.Tensor, label_T: torch.Tensor, mask_T: torch.Tensor) -> RtdOutput:
    """Add up the losses, which are already multiplied by the mask, and count the right predictions of each class."""
    predicted_replaced_T = logits_T > 0
    replaced_T = label_T * mask_T
    original_T = (1 - label_T) * mask_T
    return RtdOutput(
        loss_sum=loss_T.sum(),
        mask_sum=mask_T.sum(),
        logits_T=logits_T,
        replaced_correct=(replaced_T * predicted_replaced_T).sum(),
        replaced_count=replaced_T.sum(),
        original_correct=(original_T * ~predicted_replaced_T).sum(),
        original_count=original_T.sum(),
    )
