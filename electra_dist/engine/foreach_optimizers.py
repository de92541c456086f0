"""AdamW as the ELECTRA paper used it, LAMB and Muon, by torch._foreach operations over lists of tensors.

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

Muon is momentum whose update is made nearly orthogonal, for the matrices of the layers, and AdamW for all the rest:

    m = b m + (1 - b) g;   u = (1 - b) g + b m;   p -= lr * (0.2 * sqrt(max(rows, columns)) * O(u) + decay * p)

O(u) replaces the singular values of u by values near 1, by five steps of a quintic Newton-Schulz iteration. The factor
gives an update the size of AdamW's, so that one learning rate and one decay hold for both. Query, key and value, which
are one parameter, are three matrices. The momentum b is 0.95.

The same gradients, weights and momenta give the same update; a step that the caller refuses changes no momentum. Every
rank has whole matrices and computes the same updates. DeepSpeed's own Muon is not used: it takes the gradient norm
over orthogonal updates, and changes the momentum before a step can be refused. The state is that of AdamW, whose
second moment stays zero for these matrices, so that checkpoints have one layout.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), for the iteration and its coefficients; Liu
et al. 2025 (arXiv 2502.16982), for the factor. Cost: 15 matrix products for each matrix and step, in bf16 on a GPU and
fp32 on a CPU; nothing was measured on a GPU.

Limits: LAMB and Muon need whole parameters, hence ZeRO stage 0 (`config/rules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from typing_extensions import override

MOMENTS = ("exp_avg", "exp_avg_sq")

# Of Muon.
MUON_MOMENTUM = 0.95
_RMS_OF_ADAMW = 0.2  # typical root mean square of AdamW's updates, which Muon's are scaled to
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, by Jordan et al.
_NUM_ITERATIONS = 5
# The iteration brings singular values near 1, not to 1.
_LEAST_SINGULAR_VALUE = 0.5
_LARGEST_SINGULAR_VALUE = 1.5
_TEST_SHAPE = (24, 16)  # of the matrix whose update is checked when an engine is built


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


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return an fp32 matrix with the singular vectors of `matrix` and singular values of 0.7 to 1.2.

    Singular values below 1 % of the matrix's norm stay smaller. The products are in bf16 on a GPU.
    """
    a, b, c = _COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    if matrix.device.type == "cuda":
        x = x.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        x = x.T  # the products are then of the smaller size
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    if is_tall:
        x = x.T
    return x.to(matrix.dtype)


class ForeachMuon(ForeachAdamW):
    """Muon for parameter groups with a key `num_matrices`, AdamW without bias correction for all other groups.

    `num_matrices` is the number of matrices of equal shape that a parameter stacks along its rows: 3 for query, key
    and value, 2 for inner values and gates, otherwise 1.
    """

    @torch.no_grad()
    @override
    def update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        if "num_matrices" not in group:
            super().update_group(group, params)
            return
        momenta, _ = moments_of(self, params)
        for parameter, momentum in zip(params, momenta, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            momentum.lerp_(gradient, 1.0 - MUON_MOMENTUM)
            blend = gradient.lerp(momentum, MUON_MOMENTUM)
            parts = [orthogonalize(part) for part in blend.chunk(group["num_matrices"])]
            scale = _RMS_OF_ADAMW * math.sqrt(max(parts[0].shape))
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(torch.cat(parts), alpha=-group["lr"] * scale)


def check_muon(optimizer: Any) -> None:
    """Check that DeepSpeed's optimizer updates by Muon, and that Muon's update of a small test matrix is orthogonal.

    Raises RuntimeError if not. The weights and the optimizer's state are not touched.
    """
    base = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed wraps the optimizer that does the updates
    muon_groups = [group for group in base.param_groups if "num_matrices" in group]
    if not muon_groups or not isinstance(base, ForeachMuon):
        raise RuntimeError("optimizer.name is muon, but no parameter group is updated by Muon; report this")
    parameter = torch.nn.Parameter(torch.zeros(_TEST_SHAPE, device=muon_groups[0]["params"][0].device))
    gradient = torch.randn(_TEST_SHAPE, generator=torch.Generator().manual_seed(0))
    parameter.grad = gradient.to(parameter.device)
    group = {"params": [parameter], "num_matrices": 1}
    ForeachMuon([group], lr=1.0, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0).step()
    update = parameter.detach() / (_RMS_OF_ADAMW * math.sqrt(max(_TEST_SHAPE)))
    singular_values = torch.linalg.svdvals(update.cpu())  # a GPU would load and set up cuSOLVER for it
    least = float(singular_values.min())
    largest = float(singular_values.max())
    if least < _LEAST_SINGULAR_VALUE or largest > _LARGEST_SINGULAR_VALUE:
        raise RuntimeError(
            f"optimizer.name is muon, but the update of a test matrix has singular values from {least:.3g} to "
            f"{largest:.3g} instead of about 1; set optimizer.name: adamw, and report this"
        )
