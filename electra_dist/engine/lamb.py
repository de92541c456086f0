"""LAMB: Adam whose step is scaled, parameter by parameter, to the norm of the parameter.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   r = m / (sqrt(v) + eps) + decay * p
    p -= lr * (|p| / |r|) * r,   norms over the whole parameter; the ratio is 1 where either norm is 0

LayerNorm and bias parameters (groups without decay) take the step r without the ratio, as in NVIDIA's recipe for
ELECTRA, which `configs/base_size_lamb_phase*.yaml` follow.

There is no bias correction, so no step counter has to be in the checkpoint. Bias correction would multiply m / sqrt(v)
by a factor. The ratio |p| / |r| cancels that factor, except for its effect on eps and on the share of the decay in r.
Moments are fp32 under the names that checkpoints use.

Source: You et al., ICLR 2020, algorithm 2. Cost: two norms per parameter beside AdamW's work; the host never waits.

Limits: LAMB needs whole parameters, hence ZeRO stage 0 (`config/rules.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from electra_dist.engine.adamw import ForeachAdamW, moments_of


class ForeachLamb(ForeachAdamW):
    """LAMB without bias correction, computed by torch._foreach operations over lists of tensors, on any device."""

    @torch.no_grad()
    @override
    def update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        grads = [parameter.grad for parameter in params]
        exp_avgs, exp_avg_sqs = moments_of(self, params)
        beta1, beta2 = group["betas"]
        # m = b1 m + (1 - b1) g
        torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
        # v = b2 v + (1 - b2) g^2
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)
        # r = m / (sqrt(v) + eps) + decay * p
        denominators = list(torch._foreach_sqrt(exp_avg_sqs))
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(exp_avgs, denominators))
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            # r is scaled by |p| / |r|
            torch._foreach_mul_(updates, _trust_ratios(params, updates))
        # p -= lr * r
        torch._foreach_add_(params, updates, alpha=-group["lr"])


def _trust_ratios(params: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return |p| / |r| for each parameter p and its update r, or 1 where a norm is 0; the host does not wait."""
    param_norms = torch._foreach_norm(params)
    update_norms = torch._foreach_norm(updates)
    ratios = []
    for param_norm, update_norm in zip(param_norms, update_norms):
        is_defined = (param_norm > 0) & (update_norm > 0)
        ratios.append(torch.where(is_defined, param_norm / update_norm, 1.0))
    return ratios
