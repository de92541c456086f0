"""LAMB: Adam whose step is scaled, parameter by parameter, to the parameter's own norm.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   r = m / (sqrt(v) + eps) + decay * p
    p -= lr * (|p| / |r|) * r,   norms over the whole parameter; the ratio is 1 where either norm is 0

LayerNorm and bias parameters (groups without decay) take the step r itself, as in the recipes that this serves.

No bias correction: there is no step counter to checkpoint, and the ratio cancels the factor it would put before m /
sqrt(v), up to eps and the decay's share. Moments are fp32 under the names that checkpoints know.

Source: You et al., ICLR 2020, algorithm 2. Cost: two norms a parameter beside AdamW's work; the host never waits.

Where it stops: whole parameters only, hence ZeRO stage 0 (`optimizer.check_optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from electra_dist.engine.adamw import moments_of


class ForeachLamb(torch.optim.Optimizer):
    """The update above over lists of tensors; fp32 state, any device."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: DeepSpeed never passes one
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            grads = [p.grad for p in params]
            exp_avgs, exp_avg_sqs = moments_of(self, params)
            beta1, beta2 = group["betas"]
            torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)
            updates = list(torch._foreach_sqrt(exp_avg_sqs))
            torch._foreach_add_(updates, group["eps"])
            updates = list(torch._foreach_div(exp_avgs, updates))
            if group["weight_decay"]:
                torch._foreach_add_(updates, params, alpha=group["weight_decay"])
                torch._foreach_mul_(updates, _trust_ratios(params, updates))
            torch._foreach_add_(params, updates, alpha=-group["lr"])


def _trust_ratios(params: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """|p| / |r| of each parameter, 1 where either is 0; scalars on the device."""
    ratios = zip(torch._foreach_norm(params), torch._foreach_norm(updates))
    return [torch.where((p > 0) & (r > 0), p / r, 1.0) for p, r in ratios]
