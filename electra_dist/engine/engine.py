"""The DeepSpeed engine: our config in, a thing that steps out. The only file that talks to deepspeed.initialize.

Guarantees: the DeepSpeed JSON is derived from Config in one pure function; master weights, moments and the sum over
micro-batches are fp32 at every stage; nothing is compiled at start on a CPU.

What the stages run (DeepSpeed 0.19.8, tried here):
  fp32   0: plain optimizer; 1, 2, 3: ZeRO over fp32.
  bf16   0: torch autocast over fp32 parameters, because DeepSpeed's own bf16 path at stage 0 accumulates in bf16;
         1: BF16_Optimizer with fp32 accumulation; 2, 3: ZeRO with bf16 parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from electra_dist.config import EngineConfig, OptimizerConfig, TrainConfig
from electra_dist.engine.distributed import local_device
from electra_dist.engine.optimizer import build_optimizer
from electra_dist.errors import UserError
from electra_dist.objectives.base import Objective, StepInput, StepOutput


def deepspeed_config(train: TrainConfig, engine: EngineConfig, clip_norm: float) -> dict[str, Any]:
    """The DeepSpeed JSON. Gradient accumulation follows the world size by itself: both batch sizes are given."""
    stage, bf16 = engine.zero_stage, train.precision == "bf16"
    config: dict[str, Any] = {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_clipping": clip_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    if bf16 and stage == 0:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if engine.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return config


def check_world_size(train: TrainConfig, world_size: int) -> None:
    """Refuse a number of ranks that cannot share the global batch evenly.

    Raises:
        UserError: names the numbers of ranks that do.
    """
    if not train.micro_batches(world_size):
        valid = [str(ranks) for ranks in train.possible_ranks()]
        shown = ", ".join(valid if len(valid) <= 12 else [*valid[:6], "...", *valid[-3:]])
        raise UserError(
            f"train.global_batch {train.global_batch} is not a multiple of train.micro_batch {train.micro_batch} x "
            f"{world_size} ranks; with this micro_batch use {shown} ranks, or change micro_batch"
        )


class Engine:
    """An objective under DeepSpeed. One optimizer step = `num_micro_batches` calls of `backward`, then `step`.

    The update itself passes a gate: DeepSpeed calls the optimizer after it has reduced the gradients and found their
    norm, and the optimizer then asks whether it may. At no stage is anything changed by a step that may not.
    """

    def __init__(
        self, module: Objective, train: TrainConfig, engine: EngineConfig, optimizer_config: OptimizerConfig
    ) -> None:
        """Wrap `module`; the process group must exist (`init_distributed`)."""
        self.device = local_device()
        optimizer, self.optimizer_name = build_optimizer(module, optimizer_config, self.device.type)
        self._update = optimizer.step
        optimizer.step = self._update_if_allowed  # type: ignore[method-assign, assignment]
        self._accept: Callable[[], bool] = lambda: True
        self._applied: bool | None = None  # of the step at work: not asked yet, or the answer
        self._norm = math.nan
        self.zero_stage = engine.zero_stage
        self.clip_norm = optimizer_config.clip_norm
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(train, engine, self.clip_norm),
            dist_init_required=False,
        )
        self.num_micro_batches: int = self.deepspeed.gradient_accumulation_steps()

    def forward(self, given: StepInput) -> StepOutput:
        """Return the objective's output for one micro-batch, computed through DeepSpeed's hooks.

        DeepSpeed calls `Objective.forward`, which leads to `compute_loss` of the objective.
        """
        return self.deepspeed(given)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of one micro-batch's loss (a sum already divided by the global count).

        DeepSpeed averages over ranks and micro-batches; the factor undoes it exactly, because it is applied to a
        loss that all ranks scale alike.
        """
        self.deepspeed.backward(loss * (dist.get_world_size() * self.num_micro_batches))

    def step_micro_batch(self) -> None:
        """End a micro-batch that is not the last of its step."""
        self.deepspeed.step()

    def step(self, learning_rate: float, accept: Callable[[], bool] = lambda: True) -> tuple[float, bool]:
        """Clip, update, zero the gradients.

        Args:
            accept: asked once, when the gradients are reduced and finite: may the update be made? Its answer must be
                the same on all ranks.

        Returns:
            The global gradient norm before clipping (NaN if it is not finite), and whether the update was made.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self._accept, self._applied = accept, None
        if self.zero_stage == 0:
            self._norm = float(self._unpartitioned_grad_norm())
        self.deepspeed.step()
        if self.zero_stage:
            self._norm = float(self.deepspeed.get_global_grad_norm())
        return (self._norm if _is_norm(self._norm) else math.nan), bool(self._applied)

    def _update_if_allowed(self) -> None:
        """What DeepSpeed calls as `optimizer.step`, once a step or once for each group of parameters."""
        if self._applied is None:
            norm = float(self.optimizer._global_grad_norm) if self.zero_stage else self._norm
            self._applied = _is_norm(norm) and self._accept()
        if self._applied:
            self._update()

    def _unpartitioned_grad_norm(self) -> torch.Tensor:
        """At stage 0 DeepSpeed clips without telling the norm; the gradients are whole and already reduced."""
        return torch.nn.utils.get_total_norm(
            [p.grad for p in self.deepspeed.module.parameters() if p.grad is not None]
        )

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self.deepspeed.train(mode)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers."""
        self.deepspeed.destroy()


def _is_norm(norm: float) -> bool:
    """DeepSpeed says inf, NaN or -1 of a gradient that is not finite."""
    return math.isfinite(norm) and norm >= 0
