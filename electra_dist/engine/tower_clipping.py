"""Clip the gradients of generator and discriminator each to a norm of its own, at every ZeRO stage.

Guarantee: with `optimizer.generator` the gradients of the generator's parameter groups are scaled by
min(1, clip / (norm + 1e-6)), with the norm and the bound of the generator, and all other gradients by the same formula
with the norm and the bound of the discriminator. All ranks use the same factors. Sums of squares are float64, so that
the factor does not depend on how ZeRO cuts the gradients, except for the rounding of a float64 sum.

How: DeepSpeed clips by one norm over all parameters, so its own clipping is switched off. Before DeepSpeed's step,
each rank measures its own part of the reduced gradients. One all-reduce adds the two sums of squares; the host does
not wait for the device. The factors are applied when DeepSpeed calls the optimizer for a group, to the fp32 gradients
of that group.

Limits: tested with DeepSpeed 0.19.8, whose attributes this file reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

_EPS = 1e-6  # added to a norm before dividing by it, as DeepSpeed and torch do


class TowerClipping:
    """Separate clipping of generator and discriminator: after a step's last backward, call `measure`, then `apply`."""

    def __init__(self, discriminator_clip: float, generator_clip: float, device: torch.device) -> None:
        self._clip_2 = torch.tensor([discriminator_clip, generator_clip], dtype=torch.float64, device=device)
        self._factor_2 = torch.ones(2, device=device)

    def measure(self, optimizer: Any, gradient_scale: float = 1.0) -> None:
        """Compute both clipping factors; gradients are multiplied by `gradient_scale`. Collective at stages 1 to 3."""
        square_2 = torch.zeros_like(self._clip_2)
        for group, gradients in _gradient_parts(optimizer):
            tower = int(group["is_generators"])
            for gradient in gradients:
                norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
                square_2[tower] += norm.to(square_2.device) ** 2
        is_partitioned = not isinstance(optimizer, torch.optim.Optimizer)
        if is_partitioned:
            dist.all_reduce(square_2)
        norm_2 = square_2.sqrt() / gradient_scale
        self._factor_2 = (self._clip_2 / (norm_2 + _EPS)).clamp(max=1.0).float()

    def apply(self, groups: list[dict[str, Any]]) -> None:
        """Clip in place: multiply each group's gradients by the factor of the generator or of the discriminator."""
        for group in groups:
            factor = self._factor_2[int(group["is_generators"])]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))


def _gradient_parts(optimizer: Any) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Yield each parameter group with this rank's part of its gradients; at stage 3 a group may come repeatedly."""
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            yield group, [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        return
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, BF16_Optimizer):
        for group, partition in zip(groups, optimizer.fp32_groups_gradient_flat_partition, strict=True):
            yield group, [partition]
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for index, group in enumerate(groups):
            if optimizer.cpu_offload:
                yield group, [optimizer.single_partition_of_fp32_groups[index].grad]
            else:
                yield group, optimizer.averaged_gradients[index]
    else:
        assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
        for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            group = groups[optimizer.sub_group_to_group_id[index]]
            yield group, [master.grad] if optimizer.offload_optimizer else optimizer.averaged_gradients[index]
