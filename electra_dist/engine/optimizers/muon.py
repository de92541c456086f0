"""Muon: momentum whose update is made nearly orthogonal, for the matrices of the layers; AdamW for all the rest.

    m = b m + (1 - b) g;   u = (1 - b) g + b m;   p -= lr * (0.2 * sqrt(max(rows, columns)) * O(u) + decay * p)

O(u) replaces the singular values of u by values near 1, by five steps of a quintic Newton-Schulz iteration. The factor
gives an update the size of AdamW's, so that one learning rate and one decay hold for both. Query, key and value, which
are one parameter, are three matrices. The momentum b is 0.95.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), for the iteration and its coefficients; Liu
et al. 2025 (arXiv 2502.16982), for the factor.

Guarantee: at the ZeRO stages 0, 1 and 2 the same gradients, weights and momenta give the same update. A step that the
caller refuses changes no momentum.

How: at stage 0 parameters are whole, and every rank computes the same updates. At stages 1 and 2 a rank has a flat
partition of many parameters. It computes the momentum and u of its elements, gets the rest of the matrices that it
shares with other ranks (`matrix_partition.py`), and applies its own part of O(u). DeepSpeed's own Muon is not used: it
takes the gradient norm over orthogonal updates, and changes the momentum before a step can be refused. The state is
that of AdamW, whose second moment stays zero for these matrices, so that checkpoints have one layout.

Cost: 15 matrix products for each matrix and step, in bf16 on a GPU and fp32 on a CPU; nothing was measured on a GPU.

Limits: not at ZeRO stage 3 (`config.check_optimizer`). Tested with DeepSpeed 0.19.8, whose partitions this file
reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from electra_dist.engine.optimizers.adamw import ForeachAdamW, moments_of
from electra_dist.engine.optimizers.matrix_partition import MatrixPartition

MOMENTUM = 0.95
_RMS_OF_ADAMW = 0.2  # typical root mean square of AdamW's updates, which Muon's are scaled to
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, by Jordan et al.
_NUM_ITERATIONS = 5
# The iteration brings singular values near 1, not to 1.
_LEAST_SINGULAR_VALUE = 0.5
_LARGEST_SINGULAR_VALUE = 1.5
_TEST_SHAPE = (24, 16)  # of the matrix whose update is checked when an engine is built


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of an fp32 matrix to 0.7 to 1.2; those below 1 % of its norm come out smaller."""
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

    `num_matrices` is the number of equal matrices that a parameter stacks along its rows: 3 for query, key and value,
    2 for inner values and gates, otherwise 1. Under ZeRO stages 1 and 2 call `adopt_partitions` before the first step.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        # ZeRO replaces the parameters of a group by one flat partition of them.
        self.whole_parameters = [list(group["params"]) for group in self.param_groups]

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
            if "partition" in group:
                _update_partition(group, parameter, blend)
                continue
            parts = [orthogonalize(part) for part in blend.chunk(group["num_matrices"])]
            scale = _RMS_OF_ADAMW * math.sqrt(max(parts[0].shape))
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(torch.cat(parts), alpha=-group["lr"] * scale)


def _update_partition(group: dict[str, Any], partition: torch.Tensor, blend: torch.Tensor) -> None:
    """Update this rank's partition by Muon; `blend` has the same elements of u. Collective."""
    matrices: MatrixPartition = group["partition"]
    partition.mul_(1.0 - group["lr"] * group["weight_decay"])
    for matrix in matrices.gather(blend):
        update = orthogonalize(matrix.values).reshape(-1)[matrix.own]
        scale = _RMS_OF_ADAMW * math.sqrt(max(matrix.values.shape))
        partition[matrix.in_partition].add_(update.to(partition.device), alpha=-group["lr"] * scale)


def adopt_partitions(optimizer: Any, device: torch.device) -> None:
    """Let Muon update the partitions of ZeRO stage 1 or 2; call it after deepspeed.initialize, before a step."""
    base = getattr(optimizer, "optimizer", optimizer)  # ZeRO wraps the optimizer that does the updates
    if base is optimizer or not isinstance(base, ForeachMuon):
        return
    for group, parameters in zip(base.param_groups, base.whole_parameters, strict=True):
        if "num_matrices" not in group:
            continue
        shapes = []
        for parameter in parameters:
            rows, columns = parameter.shape
            shapes += [(rows // group["num_matrices"], columns)] * group["num_matrices"]
        [partition] = group["params"]
        group["partition"] = MatrixPartition(shapes, partition.numel(), dist.get_rank(), dist.get_world_size(), device)
        _check_layout(parameters, group["partition"])


def _check_layout(parameters: list[Any], partition: MatrixPartition) -> None:
    """Raise unless this rank's partition holds the parameters one after another, by DeepSpeed's own record of it."""
    own = partition.partitions[partition.rank]
    start = 0
    for parameter in parameters:
        link = parameter._hp_mapping
        if link is not None:
            recorded_start = own.start + link.hp_fragment_address.start - link.lp_fragment_address.start
            if recorded_start != start:
                raise RuntimeError(
                    f"DeepSpeed keeps a parameter of shape {tuple(parameter.shape)} from element {recorded_start} of "
                    f"its group on, and Muon expects it at {start}; set engine.zero_stage: 0, and report this"
                )
        start += parameter.numel()


def check_update(optimizer: Any) -> None:
    """Raise RuntimeError unless the optimizer's update of a test matrix is orthogonal; change nothing. Collective."""
    base = getattr(optimizer, "optimizer", optimizer)  # ZeRO wraps the optimizer that does the updates
    muon_groups = [group for group in base.param_groups if "num_matrices" in group]
    if not muon_groups or not isinstance(base, ForeachMuon):
        raise RuntimeError("optimizer.name is muon, but no parameter group is updated by Muon; report this")
    update = _update_of_test_matrix(base, muon_groups[0])
    if update is None:
        return
    singular_values = torch.linalg.svdvals(update / (_RMS_OF_ADAMW * math.sqrt(max(_TEST_SHAPE))))
    least = float(singular_values.min())
    largest = float(singular_values.max())
    if least < _LEAST_SINGULAR_VALUE or largest > _LARGEST_SINGULAR_VALUE:
        raise RuntimeError(
            f"optimizer.name is muon, but the update of a test matrix has singular values from {least:.3g} to "
            f"{largest:.3g} instead of about 1; set optimizer.name: adamw, and report this"
        )


def _update_of_test_matrix(optimizer: ForeachMuon, group: dict[str, Any]) -> torch.Tensor | None:
    """Return the update of a zero matrix by a random gradient, [24, 16]; None if this rank has no element of it."""
    gradient = torch.randn(_TEST_SHAPE, generator=torch.Generator().manual_seed(0))
    test_group = {**group, "lr": 1.0, "num_matrices": 1}
    partition: MatrixPartition | None = group.get("partition")
    if partition is not None:
        numel = -(-gradient.numel() // partition.num_ranks)  # rounded up
        partition = MatrixPartition([_TEST_SHAPE], numel, partition.rank, partition.num_ranks, partition.device)
        test_group["partition"] = partition
        padding = numel * partition.num_ranks - gradient.numel()
        padded = torch.nn.functional.pad(gradient.reshape(-1), (0, padding))
        gradient = padded[partition.rank * numel : (partition.rank + 1) * numel]
    parameter = torch.nn.Parameter(torch.zeros_like(gradient, device=group["params"][0].device))
    parameter.grad = gradient.to(parameter.device)
    optimizer.update_group(test_group, [parameter])
    del optimizer.state[parameter]
    if partition is None:
        return parameter.detach()
    matrices = partition.gather(parameter.detach())
    return matrices[0].values if matrices else None
