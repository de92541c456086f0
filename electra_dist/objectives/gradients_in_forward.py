"""Computes the gradients of a loss during the forward pass, so that its activations can be freed at once.

The generator's samples carry no gradient, so the generator's backward pass needs nothing that is computed after them.
If that backward pass runs at once, the generator's activations are freed before those of the discriminator are
allocated, and peak memory never holds both. DeepSpeed allows one backward pass per micro-batch. The gradients are
therefore kept in buffers of the parameters' size. DeepSpeed's backward pass multiplies the buffers by the upstream
gradient and passes them on to the parameters.

Guarantee: gradients are those of an ordinary backward pass, except for rounding where generator and discriminator
share a table, because its gradients are added in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _PrecomputedGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        gradients: list[torch.Tensor],
        gradient_scale: float | None,
        *parameters: torch.Tensor,  # autograd passes gradients only to tensors that are arguments
    ) -> torch.Tensor:
        ctx.gradients = gradients
        ctx.gradient_scale = gradient_scale
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the kept gradients times `upstream`. It works once: they are scaled in place and released."""
        gradients = ctx.gradients
        ctx.gradients = []
        if ctx.gradient_scale is not None:
            upstream = upstream / ctx.gradient_scale
        scaled_gradients = [gradient.mul_(upstream) for gradient in gradients]
        return None, None, None, *scaled_gradients


def with_gradients_now(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], gradient_scale: float | None = None
) -> torch.Tensor:
    """Differentiate `loss` now, free its activations, and return the same scalar with the gradients attached.

    A backward pass through the result may run once; it needs no activations. `loss` must be scaled already, so that
    gradients in low precision have their final size. `gradient_scale` is the upstream gradient of that backward pass:
    fp16 needs it, because small gradients of the unscaled loss would be rounded to zero.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    scaled_loss = loss if gradient_scale is None else loss * gradient_scale
    gradients = torch.autograd.grad(scaled_loss, trainable, allow_unused=True)
    used_parameters = []
    used_gradients = []
    for parameter, gradient in zip(trainable, gradients):
        if gradient is not None:
            used_parameters.append(parameter)
            used_gradients.append(gradient)
    return _PrecomputedGradients.apply(loss.detach(), used_gradients, gradient_scale, *used_parameters)
