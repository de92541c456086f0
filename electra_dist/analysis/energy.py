"""Estimate the electric energy of a run from the power of its GPUs, which a run records where a driver gives it.

The energy is the product of the mean recorded power, the time in which the run's processes existed, and the
number of nodes. Evaluations, saves, restores and repeated steps thus count as training does; time in the queue does
not.

Limits: the GPUs alone, without processors, network and cooling. Only the power of the first rank's node is known; the
other nodes are assumed to need as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from electra_dist.run.goodput import Goodput


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Estimated energy of the GPUs of a run."""

    mean_power_w: float  # of all GPUs of one node
    num_nodes: int
    seconds: float  # in which the run's processes existed

    @property
    def kwh(self) -> float:
        """Return the energy in kilowatt-hours."""
        return self.mean_power_w * self.num_nodes * self.seconds / 3.6e6


class PowerReading(NamedTuple):
    """Power at a logged step."""

    step: int
    step_s: float  # mean seconds of a step since the reading before
    power_w: float | None  # of all GPUs of one node; None if it is not known


def energy_of(readings: Iterable[PowerReading], account: Goodput, environment: dict[str, Any]) -> Energy | None:
    """Return the estimated energy of a run; None if no GPU power or no running time was recorded.

    `readings` come oldest first; `environment` is the content of environment.json.
    """
    weighted_power = 0.0
    weight_s = 0.0
    step_before = 0
    for step, step_s, power_w in readings:
        if power_w is not None:
            stands_for_s = step_s * (step - step_before)
            weighted_power += power_w * stands_for_s
            weight_s += stands_for_s
        step_before = step
    seconds = account.wall - account.queue - account.boot - account.down
    if weight_s <= 0 or seconds <= 0:
        return None
    return Energy(
        mean_power_w=weighted_power / weight_s,
        num_nodes=max(1, len(environment.get("hosts", {}))),
        seconds=seconds,
    )
