"""A loss whose gradients are made while it is computed, so that its activations are gone when it is returned.

The generator's sample carries no gradient, so nothing that comes after it is needed for the generator's backward pass.
Made at once, the peak is the larger tower's activations, not the sum of both towers'. DeepSpeed allows one backward
pass a micro-batch: the gradients wait in buffers of the parameters' size and are handed on, times what arrives.

Same numbers as the ordinary way but for the order in which a shared table's gradients are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Made(torch.autograd.Function):
    """A scalar with the gradients that it has been found to have."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []  # a second backward would find none
        return None, None, *(gradient.mul_(upstream) for gradient in gradients)


def with_gradients_now(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the same scalar without its graph: `loss` is differentiated here and its activations are freed.

    Args:
        loss: a scalar; already scaled, so that gradients stored in low precision are of their final size.
        parameters: whatever of its graph may need a gradient; others do not get one.
    """
    wanted = [p for p in parameters if p.requires_grad]
    made = torch.autograd.grad(loss, wanted, allow_unused=True)
    used = [(p, gradient) for p, gradient in zip(wanted, made) if gradient is not None]
    return _Made.apply(loss.detach(), [gradient for _, gradient in used], *(p for p, _ in used))
