"""Gives each step's values of the config keys of the objective that take a number or a schedule.

Guarantee: the values of step t are a pure function of (config, t, num_steps). A scheduled value that equals a plain
number gives the same bits as that number (with `mask_prob`, as long as the number of slots is the same).

How: the values are numbers on the host, and reach a kernel as arguments of its launch, so that nothing is compiled
anew when one changes. The number of slots for masked positions follows from the largest `mask_prob` of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from electra_dist.config import ObjectiveConfig
from electra_dist.config.schedule import schedules_of, value_at

_WEIGHTS = frozenset({"mlm_weight", "rtd_weight"})
_LAST = 1.0  # progress at the end of a run


@dataclass(frozen=True, kw_only=True)
class ScheduledValues:
    """Values at one step of those settings of the objective that may follow a schedule."""

    # Not a NamedTuple, for the reason that StepInput gives: DeepSpeed's hooks rebuild tuples.

    temperature: float  # divides the generator's logits before sampling
    mask_prob: float  # share of the tokens that is masked
    mlm_weight: float  # weight of the generator's loss
    rtd_weight: float  # weight of the discriminator's loss
    random_share: float  # share of the masked positions with a random replacement

    @classmethod
    def at(cls, objective: ObjectiveConfig, progress: float) -> ScheduledValues:
        """Return the values at the point of a run where the share `progress`, in [0, 1], of its steps is done."""
        return cls(
            temperature=value_at(objective.temperature, progress),
            mask_prob=value_at(objective.mask_prob, progress),
            mlm_weight=value_at(objective.mlm_weight, progress),
            rtd_weight=value_at(objective.rtd_weight, progress),
            random_share=value_at(objective.random_share, progress),
        )


class Schedules:
    """Schedules of a run's objective; they have no state, so a checkpoint need not save them."""

    def __init__(self, objective: ObjectiveConfig, num_steps: int) -> None:
        """Take the settings and the number of steps of the whole run; schedules depend on step / num_steps."""
        self._objective = objective
        self._num_steps = num_steps
        self._schedule_of_key = schedules_of(objective)

    def values(self, step: int) -> ScheduledValues:
        """Return the values at a step; steps count from 0."""
        return ScheduledValues.at(self._objective, step / self._num_steps)

    @property
    def change_weights(self) -> bool:
        """Return whether a loss weight follows a schedule; total losses of different steps are then not comparable."""
        return not _WEIGHTS.isdisjoint(self._schedule_of_key)

    def jumps_at(self, step: int) -> bool:
        """Return whether a schedule of shape "step" jumps at this step; earlier losses are then not comparable."""
        if step == 0:
            return False
        before = (step - 1) / self._num_steps
        now = step / self._num_steps
        jumping = [schedule for schedule in self._schedule_of_key.values() if schedule.shape == "step"]
        return any(value_at(schedule, before) != value_at(schedule, now) for schedule in jumping)


def first_values(objective: ObjectiveConfig) -> ScheduledValues:
    """Return the values of the first step; without schedules, every step has these values."""
    return ScheduledValues.at(objective, 0.0)


def evaluation_values(objective: ObjectiveConfig) -> ScheduledValues:
    """Return the values for evaluations: those at the end of the run, but temperature 1 and no random tokens.

    With these values, evaluations can be compared between steps, and between runs with different schedules.
    """
    return replace(ScheduledValues.at(objective, _LAST), temperature=1.0, random_share=0.0)
