"""Hands the values of an objective that may change from step to step to its forward passes.

These are the keys of the config's section `objective` that take a number or a schedule: the fields of `HostValues`.

Guarantee: the values of step t are a pure function of (config, t, num_steps). A scheduled value that equals a plain
number gives the same bits as that number (with `mask_prob`, as long as the number of slots is the same). Without
schedules the values are the config's numbers as Python floats, and nothing is copied to the device.

How: the scheduled values lie in one float64 tensor on the device, which is written before the forward passes of a
step. A forward pass reads views of it, so neither a kernel nor a compiled graph is made anew when a value changes, and
the host does not wait. The number of slots for masked positions follows from the largest `mask_prob` of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from electra_dist.config import ObjectiveConfig
from electra_dist.schedule import schedules_of, value_at

# A plain number of the config, or a float64 scalar tensor on the device that holds the present value of a schedule.
Scalar: TypeAlias = float | torch.Tensor

_WEIGHTS = frozenset({"mlm_weight", "rtd_weight"})
_LAST = 1.0  # progress at the end of a run


@dataclass(frozen=True, kw_only=True)
class ScheduledValues:
    """Values of one step for the keys of the objective that may be scheduled."""

    # Not a NamedTuple, for the reason that StepInput gives: DeepSpeed's hooks rebuild tuples.

    temperature: Scalar  # divides the generator's logits before sampling
    mask_prob: Scalar  # share of the tokens that is masked
    mlm_weight: Scalar  # weight of the generator's loss
    rtd_weight: Scalar  # weight of the discriminator's loss
    random_share: Scalar  # share of the masked positions with a random replacement


class HostValues(NamedTuple):
    """The values of a step as numbers on the host, for the records of a run; see `ScheduledValues`."""

    temperature: float
    mask_prob: float
    mlm_weight: float
    rtd_weight: float
    random_share: float


class Schedules:
    """The schedules of a run's objective on one rank, without state that a checkpoint would have to hold."""

    def __init__(self, objective: ObjectiveConfig, num_steps: int, device: torch.device) -> None:
        """Take the number of steps of the whole run; a schedule is a function of t / num_steps."""
        self._objective = objective
        self._num_steps = num_steps
        self._schedule_of_key = schedules_of(objective)
        self._values_K = torch.zeros(len(self._schedule_of_key), dtype=torch.float64, device=device)

    def numbers(self, step: int) -> HostValues:
        """Return the values of a step, which counts from 0."""
        return _numbers(self._objective, step / self._num_steps)

    def write(self, step: int) -> ScheduledValues:
        """Write the values of a step to the device, and return what its forward passes read.

        Results of earlier calls then hold this step's values too: their tensors are views of the same memory.
        """
        numbers = self.numbers(step)._asdict()
        if not self._schedule_of_key:
            return ScheduledValues(**numbers)
        host_K = torch.tensor([numbers[key] for key in self._schedule_of_key], dtype=torch.float64)
        if self._values_K.device.type == "cuda":
            host_K = host_K.pin_memory()  # from pageable memory the copy would wait for the queued steps
        self._values_K.copy_(host_K, non_blocking=True)
        tensors = dict(zip(self._schedule_of_key, self._values_K.unbind(), strict=True))
        return ScheduledValues(**(numbers | tensors))

    @property
    def change_weights(self) -> bool:
        """Return whether the weight of a loss is scheduled, so that total losses of different steps do not compare."""
        return not _WEIGHTS.isdisjoint(self._schedule_of_key)

    def jumps_at(self, step: int) -> bool:
        """Return whether a schedule of the shape "step" jumps here: losses then do not compare with earlier ones."""
        if step == 0:
            return False
        before = (step - 1) / self._num_steps
        now = step / self._num_steps
        jumping = [schedule for schedule in self._schedule_of_key.values() if schedule.shape == "step"]
        return any(value_at(schedule, before) != value_at(schedule, now) for schedule in jumping)


def first_values(objective: ObjectiveConfig) -> ScheduledValues:
    """Return the values of the first step as numbers; without schedules they are those of every step."""
    return ScheduledValues(**_numbers(objective, 0.0)._asdict())


def evaluation_values(objective: ObjectiveConfig) -> ScheduledValues:
    """Return the values for evaluation: those at the run's end, but temperature 1 and no random tokens.

    So evaluations of all steps, and of runs with different schedules, can be compared.
    """
    at_end = _numbers(objective, _LAST)._asdict()
    return ScheduledValues(**(at_end | {"temperature": 1.0, "random_share": 0.0}))


def weighted(weight: Scalar, scale: Scalar, loss_sum: torch.Tensor) -> torch.Tensor:
    """Return weight x scale x loss_sum, in the dtype of `loss_sum`."""
    if isinstance(weight, torch.Tensor):
        weight = weight.to(loss_sum.dtype)
    return weight * scale * loss_sum


def _numbers(objective: ObjectiveConfig, progress: float) -> HostValues:
    return HostValues(
        temperature=value_at(objective.temperature, progress),
        mask_prob=value_at(objective.mask_prob, progress),
        mlm_weight=value_at(objective.mlm_weight, progress),
        rtd_weight=value_at(objective.rtd_weight, progress),
        random_share=value_at(objective.random_share, progress),
    )
