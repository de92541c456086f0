"""AdamW as the paper used it: no bias correction, decoupled decay times the learning rate.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   p -= lr * (m / (sqrt(v) + eps) + decay * p)

Source: google-research/electra, model/optimization.py (AdamWeightDecayOptimizer). Without bias correction there is no
step counter, so the whole state is (m, v): a zero gradient on fresh state with lr 0 changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments_of(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """Return the moments of parameters, one list for each name in MOMENTS; new ones are zero, of the same dtype."""
    states = [optimizer.state[p] for p in params]
    for state, p in zip(states, params, strict=True):
        if MOMENTS[0] not in state:
            state.update({name: torch.zeros_like(p) for name in MOMENTS})
    return tuple([state[name] for state in states] for name in MOMENTS)


class ForeachAdamW(torch.optim.Optimizer):
    """That update by torch._foreach over lists of tensors: no compilation, fp32 state, any device."""

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
            torch._foreach_mul_(exp_avgs, beta1)
            torch._foreach_add_(exp_avgs, grads, alpha=1.0 - beta1)
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)
            updates = torch._foreach_sqrt(exp_avg_sqs)
            torch._foreach_add_(updates, group["eps"])
            updates = torch._foreach_div(exp_avgs, updates)
            if group["weight_decay"]:
                torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])
