"""Where each rank keeps its share of the state: parameters as named ranges ("fragments"), at every ZeRO stage.

Guarantee: over all ranks the fragments cover every element of every parameter exactly once, with its fp32 master and
both moments as writable 1-D views. Saving copies out of the views; loading copies into them and calls `publish`.
Nothing here knows the world size a checkpoint was written with, so any may load any.

How: through the partition maps that DeepSpeed's own universal checkpoint uses: `param._hp_mapping` at stages 1 and 2
and for BF16_Optimizer, `grad_position` at stage 3. At stage 0 every rank holds all; the ranks share the writing.

Tested with DeepSpeed 0.19.8. Another layout is refused with `RuntimeError`, never guessed.
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

from electra_dist.checkpoint.manifest import KINDS
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.engine.adamw import MOMENTS, ForeachAdamW, moments_of

assert ("master", *MOMENTS) == KINDS


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a parameter's share lies: `flat[offset : offset + numel]` holds its elements from `start` on."""

    name: str
    start: int
    numel: int
    flat: torch.Tensor
    offset: int


def owned_fragments(module: nn.Module, optimizer: Any) -> list[Fragment]:
    """What this rank writes: over all ranks, every element exactly once. Arguments as for `held_fragments`."""
    return _fragments(module, optimizer, dist.get_rank(), dist.get_world_size())


def held_fragments(module: nn.Module, optimizer: Any) -> list[Fragment]:
    """What this rank must be given: at stage 0 everything, above it what it owns. In the module's parameter order.

    Args:
        module: the module under the engine (`engine.module`).
        optimizer: what deepspeed.initialize returned as the optimizer.

    Raises:
        RuntimeError: DeepSpeed laid its state out in a way this file does not know.
    """
    return _fragments(module, optimizer, 0, 1)


def _fragments(module: nn.Module, optimizer: Any, share: int, num_shares: int) -> list[Fragment]:
    base = getattr(optimizer, "optimizer", optimizer)
    fragments = []
    for place in _places(module, optimizer, share, num_shares):
        moments = [of_place for (of_place,) in moments_of(base, [place.flat])]
        if not isinstance(base, ForeachAdamW):
            # Fused Adams count steps; without bias correction they never use the count.
            base.state[place.flat].setdefault("step", 0)
        whole = dict(zip(KINDS, (place.flat, *moments)))
        views = {k: t.detach().reshape(-1).narrow(0, place.offset, place.numel) for k, t in whole.items()}
        for kind, view in views.items():
            if view.dtype != torch.float32:
                raise RuntimeError(f"{kind} of {place.name} is {view.dtype}, expected float32")
        fragments.append(Fragment(name=place.name, start=place.start, numel=place.numel, views=views))
    return fragments


def publish(optimizer: Any) -> None:
    """After the fragments were overwritten: bring the parameters that the forward reads up to date, on all ranks."""
    if isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)  # drop gathered copies of the old values
        for fp32, low, parts in zip(
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups,
        ):
            low.data.copy_(fp32.data)
            for part, updated in zip(parts, optimizer.unflatten(low, parts)):
                part.data = updated.data
        if persistent:
            persistent[0].all_gather(persistent)


def shared_names(module: nn.Module) -> dict[str, str]:
    """alias -> the name under which a shared parameter is stored."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def parameter_shapes(module: nn.Module) -> dict[str, list[int]]:
    """name -> whole shape, also under ZeRO-3 where the tensors themselves are partitioned."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def _places(module: nn.Module, optimizer: Any, share: int, num_shares: int) -> Iterator[_Place]:
    locate: Callable[[str, nn.Parameter], _Place | None]
    if isinstance(optimizer, BF16_Optimizer):
        locate = _linked(optimizer.fp32_groups_flat_partition)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        locate = _linked(optimizer.single_partition_of_fp32_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        locate = _stage3(optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        locate = _replicated(share, num_shares)
    else:
        raise RuntimeError(f"checkpointing does not know DeepSpeed's {type(optimizer).__name__} (tested: 0.19.8)")
    for name, parameter in module.named_parameters():
        place = locate(name, parameter)
        if place is not None and place.numel:
            yield place


def _linked(flat_partitions: list[torch.Tensor]) -> Callable[[str, nn.Parameter], _Place | None]:
    def locate(name: str, parameter: nn.Parameter) -> _Place | None:
        if not hasattr(parameter, "_hp_mapping"):
            raise RuntimeError(f"DeepSpeed did not link {name} to its master partition (tested: 0.19.8)")
        link = parameter._hp_mapping
        if link is None:  # another rank's
            return None
        low, high = link.lp_fragment_address, link.hp_fragment_address
        flat = flat_partitions[link.param_group_index]
        return _Place(name=name, start=low.start, numel=low.numel, flat=flat, offset=high.start)

    return locate


def _stage3(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Callable[[str, nn.Parameter], _Place | None]:
    rank = dist.get_rank()

    def locate(name: str, parameter: Any) -> _Place | None:
        group, offset, partition = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * partition  # every parameter is cut into equal parts, the last ones padded
        numel = max(0, min(partition, parameter.ds_numel - start))
        flat = optimizer.fp32_partitioned_groups_flat[group]
        return _Place(name=name, start=start, numel=numel, flat=flat, offset=offset)

    return locate


def _replicated(share: int, num_shares: int) -> Callable[[str, nn.Parameter], _Place | None]:
    def locate(name: str, parameter: nn.Parameter) -> _Place | None:
        start, end = (parameter.numel() * s // num_shares for s in (share, share + 1))
        return _Place(name=name, start=start, numel=end - start, flat=parameter, offset=start)

    return locate
