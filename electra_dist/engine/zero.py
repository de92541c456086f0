"""Know how each of DeepSpeed's optimizers lays out weights and gradients: the one file that reads their attributes.

Guarantee: over all ranks, the slices of `masters` cover every element of every parameter exactly once. An optimizer of
another class, or one that lacks an attribute that is read here, is refused with one line that names it; no layout is
guessed.

How: stage 0 has the plain optimizer, so every rank holds everything. Stage 1 in bf16 is BF16_Optimizer; stage 1
otherwise, and stage 2, are DeepSpeedZeroOptimizer; stage 3 is DeepSpeedZeroOptimizer_Stage3. Slices are found through
the maps that DeepSpeed's own universal checkpoint uses: `param._hp_mapping` at stages 1 and 2, `grad_position` at 3.

Limits: tested with the version of DeepSpeed that `electra_dist/version.py` names. The gradient sums of stage 1 in bf16
(`gradient_sums.py`) and the loss scale of fp16 (`LossScale`) replace methods of DeepSpeed.
`tests/engine/test_deepspeed_assumptions.py` says which assumption another version breaks.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from typing_extensions import override

from electra_dist.checkpoint.manifest import LossScaleState, part
from electra_dist.version import DEEPSPEED

_ADVICE = f"install deepspeed=={DEEPSPEED}"
INITIAL_SCALE = 2.0**16
STEPS_UNTIL_GROWTH = 1000
HYSTERESIS = 2  # number of the first overflow that halves the scale, counted since it last grew
LEAST_SCALE = 1.0


@dataclass(frozen=True, kw_only=True)
class MasterSlice:
    """Part of one parameter's fp32 master weights that this rank keeps."""

    name: str  # of the parameter
    start: int  # first element, counted in the flattened parameter
    numel: int  # number of elements; may be 0
    flat: torch.Tensor  # what the optimizer updates: a partition of many parameters, or at stage 0 the parameter
    offset: int  # first element, counted in `flat`


class ZeroLayout(ABC):
    """Where one optimizer that `deepspeed.initialize` has built keeps master weights and gradients."""

    read: ClassVar[tuple[str, ...]] = ()  # attributes of the optimizer that this class reads
    is_partitioned: ClassVar[bool] = True  # whether each rank holds only its own part of weights and gradients
    offloads = False  # whether the optimizer's state is in host memory at ZeRO stage 1 or 2

    def __init__(self, optimizer: Any) -> None:
        for name in self.read:
            if not hasattr(optimizer, name):
                raise RuntimeError(f"DeepSpeed's {type(optimizer).__name__} has no attribute {name}; {_ADVICE}")
        self.optimizer = optimizer

    def masters(self, module: nn.Module, share: int = 0, num_shares: int = 1) -> Iterator[MasterSlice]:
        """Yield the slices of the parameters' fp32 master weights that this rank keeps, in the module's order.

        Empty slices are left out. At stage 0, where each rank has whole parameters, a slice is part `share` of
        `num_shares` parts.
        """
        for name, parameter in module.named_parameters():
            master = self._locate(name, parameter, share, num_shares)
            if master is not None and master.numel > 0:
                yield master

    @abstractmethod
    def _locate(self, name: str, parameter: Any, share: int, num_shares: int) -> MasterSlice | None:
        """Return the slice of a parameter's master weights that this rank keeps, or None if it keeps none.

        At stage 0, where it keeps all, return part `share` of `num_shares` parts.
        """

    @abstractmethod
    def gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Yield (parameter group, this rank's part of its gradients); at stage 3 a group may come several times."""

    # The next three do nothing where DeepSpeed needs no help.

    def publish(self) -> None:  # noqa: B027
        """Copy fp32 master weights that were overwritten to the parameters that the forward pass reads. Collective."""

    def forget_gradients(self) -> None:  # noqa: B027
        """Drop the last step's gradients, which DeepSpeed would use for a parameter that gets none in the next."""

    def clean_up_skipped_step(self) -> None:  # noqa: B027
        """After DeepSpeed skipped an update, drop old gradients and gather weights left partitioned. Collective."""


class Whole(ZeroLayout):
    """Layout of ZeRO stage 0: the plain optimizer, whose parameters are whole and fp32, in 16 bits under autocast."""

    is_partitioned = False

    @override
    def _locate(self, name: str, parameter: Any, share: int, num_shares: int) -> MasterSlice | None:
        start, end = part(parameter.numel(), num_shares, share)
        return MasterSlice(name=name, start=start, numel=end - start, flat=parameter, offset=start)

    @override
    def gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        for group in self.optimizer.param_groups:
            yield group, [parameter.grad for parameter in group["params"] if parameter.grad is not None]


class _Linked(ZeroLayout):
    """Layout of stages 1 and 2: DeepSpeed links each parameter to its range in a flat fp32 tensor of its group."""

    @property
    @abstractmethod
    def _partitions(self) -> list[torch.Tensor]:
        """Return this rank's fp32 partition of each parameter group."""

    @override
    def _locate(self, name: str, parameter: Any, share: int, num_shares: int) -> MasterSlice | None:
        if not hasattr(parameter, "_hp_mapping"):
            raise RuntimeError(f"DeepSpeed has not linked parameter {name} to its fp32 partition; {_ADVICE}")
        link = parameter._hp_mapping
        if link is None:  # the parameter lies wholly on other ranks
            return None
        # DeepSpeed calls the forward pass's dtype "lp" (low precision) and the master's fp32 "hp" (high precision).
        in_parameter = link.lp_fragment_address
        in_partition = link.hp_fragment_address
        return MasterSlice(
            name=name,
            start=in_parameter.start,
            numel=in_parameter.numel,
            flat=self._partitions[link.param_group_index],
            offset=in_partition.start,
        )

    @override
    def publish(self) -> None:
        self.optimizer.update_lp_params()


class Bf16Stage1(_Linked):
    """Layout of ZeRO stage 1 in bf16: BF16_Optimizer, with a group's gradient sums in one flat fp32 tensor."""

    read = ("fp32_groups_flat_partition", "fp32_groups_gradient_flat_partition", "update_lp_params", "optimizer")

    @property
    @override
    def _partitions(self) -> list[torch.Tensor]:
        return self.optimizer.fp32_groups_flat_partition

    @override
    def gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        groups = self.optimizer.optimizer.param_groups
        for group, partition in zip(groups, self.optimizer.fp32_groups_gradient_flat_partition, strict=True):
            yield group, [partition]


class Stage1And2(_Linked):
    """Layout of ZeRO stage 1 in fp32 and fp16, and of stage 2: gradients are averaged over ranks as they come."""

    read = (
        *("single_partition_of_fp32_groups", "averaged_gradients", "cpu_offload", "update_lp_params"),
        *("optimizer", "_global_grad_norm"),
    )

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.offloads = bool(optimizer.cpu_offload)

    @property
    @override
    def _partitions(self) -> list[torch.Tensor]:
        return self.optimizer.single_partition_of_fp32_groups

    @override
    def gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        for index, group in enumerate(self.optimizer.optimizer.param_groups):
            if self.offloads:
                yield group, [self._partitions[index].grad]  # type: ignore[list-item]
            else:
                yield group, self.optimizer.averaged_gradients[index]

    @override
    def clean_up_skipped_step(self) -> None:
        if not self.offloads:
            return
        # DeepSpeed keeps these gradients, and would add those of the next step to them.
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = None


class Stage3(ZeroLayout):
    """Layout of ZeRO stage 3: each parameter is cut into padded parts, one per rank, and gathered when it is used."""

    read = (
        *("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "fp16_partitioned_groups", "unflatten"),
        *("persistent_parameters", "grad_position", "get_param_id", "sub_group_to_group_id", "averaged_gradients"),
        *("grad_partitions_flat_buffer", "offload_optimizer", "optimizer", "_global_grad_norm"),
    )

    @override
    def _locate(self, name: str, parameter: Any, share: int, num_shares: int) -> MasterSlice | None:
        group, offset, partition_numel = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        start = dist.get_rank() * partition_numel
        numel_without_padding = max(0, min(partition_numel, parameter.ds_numel - start))
        return MasterSlice(
            name=name,
            start=start,
            numel=numel_without_padding,
            flat=self.optimizer.fp32_partitioned_groups_flat[group],
            offset=offset,
        )

    @override
    def gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        optimizer = self.optimizer
        groups = optimizer.optimizer.param_groups
        for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            group = groups[optimizer.sub_group_to_group_id[index]]
            yield group, [master.grad] if optimizer.offload_optimizer else optimizer.averaged_gradients[index]

    @override
    def publish(self) -> None:
        optimizer = self.optimizer
        # DeepSpeed keeps small ("persistent") parameters gathered on every rank, and these copies hold the old values.
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)  # a method of any parameter, which acts on the list that it receives
        # Three views of each parameter group: this rank's fp32 masters in one flat tensor, the same in the dtype of
        # the forward pass, and the partition of each parameter in that dtype.
        for master_group, low_precision_group, partitions in zip(
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups,
        ):
            low_precision_group.data.copy_(master_group.data)
            updated_partitions = optimizer.unflatten(low_precision_group, partitions)
            for partition, updated in zip(partitions, updated_partitions):
                partition.data = updated.data
        self._gather_persistent()

    @override
    def forget_gradients(self) -> None:
        # DeepSpeed would count the last gradient of a parameter in the norm.
        self.optimizer.grad_partitions_flat_buffer.zero_()

    @override
    def clean_up_skipped_step(self) -> None:
        # DeepSpeed leaves small ("persistent") parameters partitioned, which are otherwise whole on every rank. The
        # next step would fail if DeepSpeed has recorded the order of parameters while they were whole, as after a
        # restart.
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        persistent = self.optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


_LAYOUTS: dict[type, type[ZeroLayout]] = {
    BF16_Optimizer: Bf16Stage1,
    DeepSpeedZeroOptimizer: Stage1And2,
    DeepSpeedZeroOptimizer_Stage3: Stage3,
    torch.optim.Optimizer: Whole,
}


def layout_of(optimizer: Any) -> ZeroLayout:
    """Return the layout of an optimizer from `deepspeed.initialize`; raise RuntimeError if it is unknown."""
    for optimizer_class, layout in _LAYOUTS.items():
        if isinstance(optimizer, optimizer_class):
            return layout(optimizer)
    raise RuntimeError(f"DeepSpeed's {type(optimizer).__name__} has a layout that is not known; {_ADVICE}")


@contextlib.contextmanager
def without_memory_reports() -> Iterator[None]:
    """Within this context, keep DeepSpeed from printing lines about memory while it builds its optimizers."""
    # The function that prints them also collects garbage and resets the allocator's peak, which nothing needs. No
    # setting switches it off, so its name is replaced in the modules that call it.
    modules = (bf16_optimizer, stage_1_and_2, stage3)
    originals = [module.see_memory_usage for module in modules]
    for module in modules:
        module.see_memory_usage = lambda *_, **__: None
    try:
        yield
    finally:
        for module, original in zip(modules, originals):
            module.see_memory_usage = original


class LossScale(DynamicLossScaler):
    """DeepSpeed's dynamic loss scale for fp16, changed so that it moves only between steps and can be saved.

    The scale is a power of 2, so it changes gradients only where fp16 would round them to zero. A step whose gradients
    overflow changes the scale alone; one that the guard stops changes nothing. The state is three numbers, equal on
    all ranks and independent of the number of ranks and of the ZeRO stage; a checkpoint holds it. Call `count_update`
    after a step that has updated the weights, or `lower` after one whose gradients overflowed.
    """

    # The rule is that of DeepSpeed's `DynamicLossScaler` with DeepSpeed's default settings. It begins at 65,536.
    # The first overflow of a run, and the first one after the scale has grown, changes nothing. Each further overflow
    # halves the scale, down to 1. The first update after 1,000 updates without an overflow doubles it, and so does the
    # first one after each further 1,000. DeepSpeed changes the scale in the middle of a step, before it divides the
    # gradients by it, so that each step in which the scale grows would make half an update. Here the scale changes
    # after the step. At ZeRO stage 0, where DeepSpeed would use the scaler of torch with another rule, the engine
    # multiplies and divides by this scale. A forward pass that overflows gives a loss that is not finite, which no
    # scale can repair; the guard stops it.

    def __init__(self) -> None:
        super().__init__(
            init_scale=INITIAL_SCALE,
            scale_window=STEPS_UNTIL_GROWTH,
            min_scale=LEAST_SCALE,
            delayed_shift=HYSTERESIS,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=torch.float16,
        )

    def update_scale(self, overflow: bool) -> None:
        """Do nothing, because DeepSpeed calls this in the middle of a step, while the scale is still needed."""

    def count_update(self) -> None:
        """Count a step that has updated the weights; double the scale after 1,000 steps without an overflow."""
        super().update_scale(False)

    def lower(self) -> bool:
        """Count a step whose gradients overflowed, which may halve the scale; return False if it is 1 already."""
        if self.cur_scale <= LEAST_SCALE:
            return False
        super().update_scale(True)
        return True

    @property
    def state(self) -> LossScaleState:
        """Return the loss scale and its counters, with which `restore` continues exactly."""
        return LossScaleState(
            scale=float(self.cur_scale),
            stable_steps=self.cur_iter - self.last_overflow_iter - 1,
            hysteresis=self.cur_hysteresis,
        )

    def restore(self, state: LossScaleState | None) -> None:
        """Continue from a checkpoint's state, or from the initial state if `state` is None."""
        if state is None:
            state = LossScale().state
        self.cur_scale = state.scale
        self.cur_hysteresis = state.hysteresis
        # DeepSpeed uses the two counters only by their difference.
        self.cur_iter = state.stable_steps
        self.last_overflow_iter = -1
