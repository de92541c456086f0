"""The switch of two-stage training: the discriminator becomes a copy of the generator, and the generator rests.

Guarantee: at the step `objective.generator_only_steps`, before its forward, every fp32 master of the discriminator and
its embeddings equals the generator's, bit for bit, with moments of zero, at any ZeRO stage and number of ranks. Who
rests has a learning rate of 0, so neither momentum nor decay moves it. A run that is stopped and started again on
either side of the step, or at it, repeats an uninterrupted one: a checkpoint of that step is of before the switch.

Cost: one all-reduce of each copied parameter, once a run.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from electra_dist.config import ObjectiveConfig
from electra_dist.engine.engine import Engine
from electra_dist.engine.fragments import held_fragments, owned_fragments, parameter_shapes, publish

_COPIES = {"towers.generator.": "towers.discriminator.", "towers.embeddings.": "towers.discriminator_embeddings."}


class Stages:
    """Which tower learns at a step. Does nothing where both always do."""

    def __init__(self, engine: Engine, objective: ObjectiveConfig) -> None:
        self._engine, self._first_steps = engine, objective.generator_only_steps
        self._in_first: bool | None = None  # at the last step

    def enter(self, step: int) -> bool:
        """Call it before every step, skipped ones too; says whether the second stage begins here. Collective."""
        if not self._first_steps:
            return False
        in_first, optimizer = step < self._first_steps, self._engine.optimizer
        if in_first != self._in_first:
            self._in_first = in_first
            for group in optimizer.param_groups:
                group["lr_scale"] = float(group["is_generators"] == in_first)
            if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
                # It keeps the last gradient of a parameter that has none now, and counts it in the norm.
                optimizer.grad_partitions_flat_buffer.zero_()
        if step == self._first_steps:
            copy_generator(self._engine)
        return step == self._first_steps


def copy_generator(engine: Engine) -> None:
    """Overwrite the discriminator's and its embeddings' masters by the generator's. Collective."""
    module, optimizer = engine.deepspeed.module, engine.optimizer
    held = {fragment.name: fragment for fragment in held_fragments(module, optimizer)}
    owned = {fragment.name: fragment for fragment in owned_fragments(module, optimizer)}
    for name, shape in parameter_shapes(module).items():
        prefix = next((prefix for prefix in _COPIES if name.startswith(prefix)), None)
        if prefix is None:
            continue
        whole = torch.zeros(torch.Size(shape).numel(), device=engine.device)
        if name in owned:
            source = owned[name]
            whole[source.start : source.start + source.numel] = source.views["master"]
        dist.all_reduce(whole)
        target = held.get(_COPIES[prefix] + name.removeprefix(prefix))
        if target is not None:
            for kind, view in target.views.items():
                if kind == "master":
                    view.copy_(whole[target.start : target.start + target.numel])
                else:
                    view.zero_()
    publish(optimizer)
