"""What a rank shows its supervisor, and what it sees of its node: heartbeats, GPU health, stragglers.

Guarantee: a beat at every step and change of phase, so that a hang is noticed from outside (run/heartbeat.py).
At log steps the first rank of each node reads its GPUs; new uncorrected memory errors get the node a strike and end
the run with exit code 69, without a save: what such a GPU holds is not to be trusted.

A collective gives up after twice the limit that a supervisor has for the phase, learned step times included: without a
supervisor, ranks whose peer is behind a cut link end by themselves.

Stragglers are ranks whose first forward of a step takes longer than the median rank's by a fifth in three looks in a
row. A forward has no collective before ZeRO-3, so it is the rank's own time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from electra_dist.analysis.hangs import hang_limits
from electra_dist.analysis.stragglers import stragglers
from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Heartbeat, Phase
from electra_dist.run.strikes import Strike, add_strike, node_name
from electra_dist.train.health.gpu_monitor import GpuReading, GpuSampler, gone_bad

_LOOKS = 3
_COLLECTIVE_FACTOR = 2.0  # of the limit of the phase: a supervisor comes first, and shows the stacks
_LONGEST_COLLECTIVE_S = 3600.0


@dataclass(frozen=True)
class RankObservation:
    """What a look at the nodes found, as rank 0 knows it."""

    gpu: GpuReading | None  # of rank 0's node
    slow_ranks: list[int]


class RankMonitor:
    """One per rank, for the life of the process."""

    def __init__(self, run_dir: Path, cluster: ClusterConfig) -> None:
        self._run_dir, self._limits = run_dir, hang_limits(cluster)
        self._heartbeat = Heartbeat(run_dir, dist.get_rank())
        self._sampler = GpuSampler() if int(os.environ["LOCAL_RANK"]) == 0 else None
        self._first = self._sampler.read() if self._sampler else None
        self._looks: deque[list[float]] = deque(maxlen=_LOOKS)
        self._collective_limit_s = 0.0
        self.sick = False  # this rank's node is not to be trusted

    def began(self, attempt: int) -> None:
        """The run's attempt number is known."""
        self._heartbeat.attempt = attempt

    def beat(self, phase: Phase, step: int) -> None:
        """Say where this rank is; `step` steps are done."""
        self._heartbeat.beat(phase, step)
        limit_s = min(_COLLECTIVE_FACTOR * self._limits.of_its_collective(self._heartbeat.last), _LONGEST_COLLECTIVE_S)
        if abs(limit_s - self._collective_limit_s) > 0.1 * self._collective_limit_s:
            self._collective_limit_s = limit_s
            for group in list(c10d._world.pg_map):  # DeepSpeed has its own beside the default one
                c10d._set_pg_timeout(timedelta(seconds=limit_s), group)

    def look(self, forward_s: float) -> RankObservation:
        """Read the GPUs and compare the ranks. Collective; at log steps."""
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        if torch.cuda.is_available():
            times = [t.cuda() for t in times]
        dist.all_gather(times, torch.full_like(times[0], forward_s))
        self._looks.append([float(t) for t in times])
        reading = self._sampler.read() if self._sampler else None
        reason = gone_bad(self._first, reading)
        if reason and not self.sick:
            self.sick = True
            add_strike(
                self._run_dir, Strike(time=time.time(), node=node_name(), device="gpu", reason=reason, by="run")
            )
        return RankObservation(reading, stragglers(list(self._looks), in_a_row=_LOOKS))

    def close(self) -> None:
        """The run ends well: the supervisor need not watch this rank any more."""
        self._heartbeat.close()
        if self._sampler:
            self._sampler.close()
