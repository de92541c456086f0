"""Train in two stages: first the generator alone, then the discriminator, which starts as a copy of it.

Guarantee: the second stage begins before the forward of step `objective.generator_only_steps`. At that moment every
fp32 master weight of the discriminator and of its embeddings equals the generator's, bit for bit, and its moments are
zero, at any ZeRO stage and number of ranks. The network that does not learn in a stage has learning rate 0, so neither
momentum nor weight decay changes it. A run that is stopped and started again before, at or after the switch repeats an
uninterrupted one, because a checkpoint of that step holds the state before the copy.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from electra_dist.checkpoint.manifest import Fragment
from electra_dist.engine.engine import Engine
from electra_dist.engine.state_fragments import held_fragments, owned_fragments, parameter_shapes

# Name prefixes: parameters of the generator, and what they are copied to.
_COPIES = {"towers.generator.": "towers.discriminator.", "towers.embeddings.": "towers.discriminator_embeddings."}


class Stages:
    """The two stages of a training run: at which steps which network learns, and the copy between the stages."""

    def __init__(self, engine: Engine, generator_only_steps: int) -> None:
        self._engine = engine
        self._first_steps = generator_only_steps
        self._in_first: bool | None = None  # whether the last entered step was in the first stage; None before any

    def enter(self, step: int) -> bool:
        """Let the network of this step's stage learn; when the second begins, copy the generator to the discriminator.

        Returns True if the second stage begins with `step`. The loss is another function from then on, so do not
        compare it with losses of earlier steps. Call this before every step, also before a skipped one. Collective.
        """
        in_first = step < self._first_steps
        if in_first != self._in_first:
            self._in_first = in_first
            self._activate_tower(is_generator=in_first)
        begins_second = step == self._first_steps
        if begins_second:
            copy_generator(self._engine)
        return begins_second

    def _activate_tower(self, *, is_generator: bool) -> None:
        """Let only the generator, or only the discriminator, learn: the other's groups get `lr_scale` 0."""
        for group in self._engine.optimizer.param_groups:
            is_active = group["is_generators"] == is_generator
            group["lr_scale"] = 1.0 if is_active else 0.0
        self._engine.layout.forget_gradients()


def copy_generator(engine: Engine) -> None:
    """Copy the fp32 weights of generator and embeddings to the discriminator; zero its moments. Collective."""
    held = {fragment.name: fragment for fragment in held_fragments(engine)}
    owned = {fragment.name: fragment for fragment in owned_fragments(engine)}
    for name, shape in parameter_shapes(engine.deepspeed.module).items():
        copy_name = _copy_name(name)
        if copy_name is None:
            continue  # not a parameter of the generator
        numel = torch.Size(shape).numel()
        master = _whole_master(owned.get(name), numel, engine.device)  # collective: also where no part is held
        destination = held.get(copy_name)
        if destination is not None:  # None if this rank holds no part of the copy
            destination.views["master"].copy_(master[destination.start : destination.start + destination.numel])
            destination.views["exp_avg"].zero_()
            destination.views["exp_avg_sq"].zero_()
    engine.layout.publish()


def _copy_name(name: str) -> str | None:
    """Return which parameter of the discriminator gets a copy of parameter `name`, or None if none does."""
    for prefix, copy_prefix in _COPIES.items():
        if name.startswith(prefix):
            return copy_prefix + name.removeprefix(prefix)
    return None


def _whole_master(fragment: Fragment | None, numel: int, device: torch.device) -> torch.Tensor:
    """Return a parameter's whole fp32 master weights, 1-D, joined from the parts that the ranks hold. Collective.

    `fragment` is this rank's part, or None if it has none. `numel` is the number of elements of the parameter.
    """
    # Every element has exactly one owner, so the sum over the ranks is the master itself, bit for bit.
    master = torch.zeros(numel, device=device)
    if fragment is not None:
        master[fragment.start : fragment.start + fragment.numel] = fragment.views["master"]
    dist.all_reduce(master)
    return master
