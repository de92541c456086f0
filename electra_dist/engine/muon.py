"""Muon: momentum whose update is made nearly orthogonal, for the matrices of the layers; AdamW for all the rest.

    m = b m + (1 - b) g;   u = (1 - b) g + b m;   p -= lr * (0.2 * sqrt(max(rows, columns)) * O(u) + decay * p)

O(u) replaces the singular values of u by values near 1, by five steps of a quintic Newton-Schulz iteration. The factor
gives an update the size of AdamW's, so that one learning rate and one decay hold for both. Query, key and value, which
are one parameter, are three matrices. The momentum b is 0.95.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), for the iteration and its coefficients; Liu
et al. 2025 (arXiv 2502.16982), for the factor.

Guarantee: the same gradients, weights and momenta give the same update. A step that the caller refuses changes no
momentum.

How: at ZeRO stage 0, the only one that `config/rules.py` permits, every rank has whole matrices and computes the same
updates. DeepSpeed's own Muon is not used: it takes the gradient norm over orthogonal updates, and changes the momentum
before a step can be refused. The state is that of AdamW, whose second moment stays zero for these matrices, so that
checkpoints have one layout.

Cost: 15 matrix products for each matrix and step, in bf16 on a GPU and fp32 on a CPU; nothing was measured on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from electra_dist.engine.adamw import ForeachAdamW, moments_of

MOMENTUM = 0.95
_RMS_OF_ADAMW = 0.2  # typical root mean square of AdamW's updates, which Muon's are scaled to
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, by Jordan et al.
_NUM_ITERATIONS = 5
# The iteration brings singular values near 1, not to 1.
_LEAST_SINGULAR_VALUE = 0.5
_LARGEST_SINGULAR_VALUE = 1.5
_TEST_SHAPE = (24, 16)  # of the matrix whose update is checked when an engine is built


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
            momentum.lerp_(gradient, 1.0 - MOMENTUM)
            blend = gradient.lerp(momentum, MOMENTUM)
            parts = [orthogonalize(part) for part in blend.chunk(group["num_matrices"])]
            scale = _RMS_OF_ADAMW * math.sqrt(max(parts[0].shape))
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(torch.cat(parts), alpha=-group["lr"] * scale)


def check_update(optimizer: Any) -> None:
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
