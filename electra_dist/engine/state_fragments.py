"""Locate each rank's share of the training state as named ranges ("fragments"), at every ZeRO stage.

Guarantee: over all ranks the owned fragments cover every element of every parameter exactly once. A fragment has the
fp32 master weights and both moments as writable 1-D views. Saving copies out of the views; loading copies into them
and calls `publish`. A loading rank asks for elements and not for files, so any number of ranks may load a checkpoint.

How: through the partition maps that DeepSpeed's own universal checkpoint uses: `param._hp_mapping` at stages 1 and 2
and for BF16_Optimizer, `grad_position` at stage 3. At stage 0 every rank holds all; the ranks share the writing.

Limits: tested with DeepSpeed 0.19.8. An unknown layout is refused with `RuntimeError`, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from electra_dist.checkpoint.checkpoint_manifest import KINDS, Kind
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.engine.adamw import MOMENTS, ForeachAdamW, moments_of

assert ("master", *MOMENTS) == KINDS

_TESTED_VERSION = "0.19.8"  # of DeepSpeed


@dataclass(frozen=True, kw_only=True)
class _MasterSlice:
    """Part of one parameter's fp32 master weights that this rank keeps."""

    name: str  # of the parameter
    start: int  # first element, counted in the flattened parameter
    numel: int  # number of elements; may be 0
    flat: torch.Tensor  # what the optimizer updates: a partition of many parameters, or at stage 0 the parameter
    offset: int  # first element, counted in `flat`


# Returns the slice of a parameter (given its name and itself), or None if this rank keeps nothing of it.
_Locator = Callable[[str, nn.Parameter], _MasterSlice | None]


def owned_fragments(module: nn.Module, optimizer: Any) -> list[Fragment]:
    """Return the ranges of parameters ("fragments") that only this rank writes into a checkpoint.

    At ZeRO stage 0, where every rank holds everything, each parameter is cut into one part per rank. The fp32 views
    alias the live state of `module` and `optimizer`. Not collective.
    """
    return _fragments(module, optimizer, share=dist.get_rank(), num_shares=dist.get_world_size())


def held_fragments(module: nn.Module, optimizer: Any) -> list[Fragment]:
    """Return the ranges of parameters that this rank fills when it loads a checkpoint; call `publish` afterwards.

    At ZeRO stage 0 these are whole parameters; at stages 1 to 3 they are the same as `owned_fragments`.
    """
    return _fragments(module, optimizer, share=0, num_shares=1)


def _fragments(module: nn.Module, optimizer: Any, share: int, num_shares: int) -> list[Fragment]:
    """Return this rank's fragments (at stage 0 part `share` of `num_shares`); create missing moments as zeros."""
    base = getattr(optimizer, "optimizer", optimizer)  # ZeRO wraps the optimizer that does the updates
    fragments = []
    for master in _master_slices(module, optimizer, share, num_shares):
        exp_avgs, exp_avg_sqs = moments_of(base, [master.flat])
        if not isinstance(base, ForeachAdamW):
            # Fused Adams count steps; without bias correction they never use the count.
            base.state[master.flat].setdefault("step", 0)
        flat_tensors: dict[Kind, torch.Tensor] = {
            "master": master.flat,
            "exp_avg": exp_avgs[0],
            "exp_avg_sq": exp_avg_sqs[0],
        }
        views = {}
        for kind, tensor in flat_tensors.items():
            view = tensor.detach().reshape(-1).narrow(0, master.offset, master.numel)
            if view.dtype != torch.float32:
                raise RuntimeError(
                    f"{kind} of parameter {master.name} is {view.dtype}, but checkpoints hold float32; install "
                    f"deepspeed=={_TESTED_VERSION}"
                )
            views[kind] = view
        fragments.append(Fragment(name=master.name, start=master.start, numel=master.numel, views=views))
    return fragments


def publish(optimizer: Any) -> None:
    """Copy fp32 master weights that were overwritten to the parameters that the forward pass reads. Collective."""
    if isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _publish_stage3(optimizer)


def _publish_stage3(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    # DeepSpeed keeps small ("persistent") parameters gathered on every rank, and these copies hold the old values.
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)  # a method of any parameter, which acts on the list that it receives
    # Three views of each parameter group: this rank's fp32 masters in one flat tensor, the same in the dtype of the
    # forward pass, and the partition of each parameter in that dtype.
    for master_group, low_precision_group, partitions in zip(
        optimizer.fp32_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups,
    ):
        low_precision_group.data.copy_(master_group.data)
        updated_partitions = optimizer.unflatten(low_precision_group, partitions)
        for partition, updated in zip(partitions, updated_partitions):
            partition.data = updated.data
    if persistent:
        persistent[0].all_gather(persistent)


def shared_names(module: nn.Module) -> dict[str, str]:
    """Return the other names of shared parameters, other name -> first name; checkpoints use the first name."""
    stored_names: dict[int, str] = {}
    aliases = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stored_name = stored_names.setdefault(id(parameter), name)
        if stored_name != name:
            aliases[name] = stored_name
    return aliases


def parameter_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return every parameter's whole shape, even if ZeRO-3 partitions it; a shared parameter is listed once."""
    shapes = {}
    for name, parameter in module.named_parameters():
        whole_shape = getattr(parameter, "ds_shape", parameter.shape)  # `ds_shape` exists at ZeRO stage 3 only
        shapes[name] = list(whole_shape)
    return shapes


def _master_slices(module: nn.Module, optimizer: Any, share: int, num_shares: int) -> Iterator[_MasterSlice]:
    """Yield this rank's slice of each parameter's fp32 master weights, in the module's order, if not empty."""
    locate: _Locator
    if isinstance(optimizer, BF16_Optimizer):
        locate = _linked_locator(optimizer.fp32_groups_flat_partition)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        locate = _linked_locator(optimizer.single_partition_of_fp32_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        locate = _stage3_locator(optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        locate = _replicated_locator(share, num_shares)
    else:
        raise RuntimeError(
            f"checkpoints do not support DeepSpeed's {type(optimizer).__name__}; install deepspeed=={_TESTED_VERSION}"
        )
    for name, parameter in module.named_parameters():
        master = locate(name, parameter)
        if master is not None and master.numel > 0:
            yield master


def _linked_locator(flat_partitions: list[torch.Tensor]) -> _Locator:
    """Return a function that finds this rank's slice of a parameter, for BF16_Optimizer and ZeRO stages 1 and 2."""

    def locate(name: str, parameter: nn.Parameter) -> _MasterSlice | None:
        if not hasattr(parameter, "_hp_mapping"):
            raise RuntimeError(
                f"DeepSpeed has not linked parameter {name} to its fp32 partition; install "
                f"deepspeed=={_TESTED_VERSION}"
            )
        link = parameter._hp_mapping
        if link is None:  # the parameter lies wholly on other ranks
            return None
        # DeepSpeed calls the forward pass's dtype "lp" (low precision) and the master's fp32 "hp" (high precision).
        in_parameter = link.lp_fragment_address
        in_partition = link.hp_fragment_address
        return _MasterSlice(
            name=name,
            start=in_parameter.start,
            numel=in_parameter.numel,
            flat=flat_partitions[link.param_group_index],
            offset=in_partition.start,
        )

    return locate


def _stage3_locator(optimizer: DeepSpeedZeroOptimizer_Stage3) -> _Locator:
    """Return a function that finds this rank's slice of a parameter, without padding, for ZeRO stage 3."""
    rank = dist.get_rank()

    def locate(name: str, parameter: Any) -> _MasterSlice | None:
        group, offset, partition_numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * partition_numel
        numel_without_padding = max(0, min(partition_numel, parameter.ds_numel - start))
        return _MasterSlice(
            name=name,
            start=start,
            numel=numel_without_padding,
            flat=optimizer.fp32_partitioned_groups_flat[group],
            offset=offset,
        )

    return locate


def _replicated_locator(share: int, num_shares: int) -> _Locator:
    """Return a function that takes part `share` of `num_shares` equal parts of a parameter, for ZeRO stage 0."""

    def locate(name: str, parameter: nn.Parameter) -> _MasterSlice | None:
        numel = parameter.numel()
        start = numel * share // num_shares
        end = numel * (share + 1) // num_shares  # the start of the next part
        return _MasterSlice(name=name, start=start, numel=end - start, flat=parameter, offset=start)

    return locate
