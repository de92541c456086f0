"""AdamW as the ELECTRA paper used it, and LAMB, by torch._foreach operations over lists of tensors.

AdamW has no bias correction, and a decoupled weight decay that is multiplied by lr:

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   p -= lr * (m / (sqrt(v) + eps) + decay * p)

Source: google-research/electra, model/optimization.py (AdamWeightDecayOptimizer). Only bias correction needs a step
counter, so without it the whole state of a parameter is m and v. An update with lr 0, a zero gradient and moments of
zero therefore changes nothing.

LAMB is Adam whose step is scaled, parameter by parameter, to the norm of the parameter:

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   r = m / (sqrt(v) + eps) + decay * p
    p -= lr * (|p| / |r|) * r,   norms over the whole parameter; the ratio is 1 where either norm is 0

LayerNorm and bias parameters (groups without decay) take the step r without the ratio, as in NVIDIA's recipe for
ELECTRA, which `configs/base_size_lamb_phase*.yaml` follow.

Bias correction would multiply m / sqrt(v) by a factor. The ratio |p| / |r| cancels that factor, except for its effect
on eps and on the share of the decay in r. Moments are fp32 under the names that checkpoints use.

Source: You et al., ICLR 2020, algorithm 2. Cost: two norms per parameter beside AdamW's work; the host never waits.

Limits: LAMB needs whole parameters, hence ZeRO stage 0 (`config/rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments_of(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the first and second moments that the optimizer keeps for `params`; missing ones are created as zeros."""
    first_name, second_name = MOMENTS
    first_moments = []
    second_moments = []
    for parameter in params:
        state = optimizer.state[parameter]
        if first_name not in state:
            state[first_name] = torch.zeros_like(parameter)
            state[second_name] = torch.zeros_like(parameter)
        first_moments.append(state[first_name])
        second_moments.append(state[second_name])
    return first_moments, second_moments


class ForeachAdamW(torch.optim.Optimizer):
    """AdamW without bias correction, computed by torch._foreach operations over lists of tensors.

    CPUs use this implementation. The fused optimizers of apex and DeepSpeed follow the same update rule.
    """

    is_lamb = False

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: DeepSpeed never passes one
        """Update every parameter that has elements and a gradient. Gradients are neither clipped nor cleared."""
        for group in self.param_groups:
            # A parameter without elements has nothing to update.
            params = [parameter for parameter in group["params"] if parameter.grad is not None and parameter.numel()]
            if not params:
                continue  # torch._foreach refuses an empty list
            self.update_group(group, params)

    def update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        """Update some parameters of a group in place; each must have a gradient and at least one element."""
        grads = [parameter.grad for parameter in params]
        exp_avgs, exp_avg_sqs = moments_of(self, params)
        beta1, beta2 = group["betas"]
        # m = b1 m + (1 - b1) g; the two ways round differently.
        if self.is_lamb:
            torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
        else:
            torch._foreach_mul_(exp_avgs, beta1)
            torch._foreach_add_(exp_avgs, grads, alpha=1.0 - beta1)
        # v = b2 v + (1 - b2) g^2
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)
        # update = m / (sqrt(v) + eps) + decay * p
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(exp_avgs, denominators))
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            if self.is_lamb:
                torch._foreach_mul_(updates, _trust_ratios(params, updates))
        torch._foreach_add_(params, updates, alpha=-group["lr"])


class ForeachLamb(ForeachAdamW):
    """LAMB without bias correction, computed by torch._foreach operations over lists of tensors, on any device."""

    is_lamb = True


def _trust_ratios(params: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return |p| / |r|, the factor of LAMB, for each parameter p and its update r, or 1 where either norm is 0."""
    param_norms = torch._foreach_norm(params)
    update_norms = torch._foreach_norm(updates)
    ratios = []
    for param_norm, update_norm in zip(param_norms, update_norms):
        is_defined = (param_norm > 0) & (update_norm > 0)
        ratios.append(torch.where(is_defined, param_norm / update_norm, 1.0))
    return ratios
