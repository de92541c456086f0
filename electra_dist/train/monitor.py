"""Watch one rank: write its heartbeat, check the GPUs of its node, set timeouts of collectives, find slow ranks.

Guarantee: a rank writes its heartbeat at every step and change of phase, so that a supervisor notices a hang
(run/heartbeat.py). At logged steps the first rank of each node reads the node's GPUs. If they have new uncorrected
memory errors, the node is added to the run's record of faulty nodes (strikes.jsonl), and the run ends with exit code
69, without a save, because the state of a faulty GPU is not to be trusted.

The timeout of collectives is twice the hang limit (the time after which a supervisor ends a hanging rank), at most an
hour. If one rank waits for storage, the others wait in a collective. So the timeout always exceeds the longest wait,
`cluster.storage_patience_s`. The timeout matters in runs without a supervisor: it ends the ranks that wait for an
unreachable rank. On CPUs, gloo of torch 2.8 does not obey it.

A rank is slow if its first forward pass of a step takes more than 1.2 times the median rank's time at three logged
steps in a row. Below ZeRO stage 3 a forward pass has no collective, so it is the rank's own time. One slow shard,
garbage collection or checkpoint is not enough.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from electra_dist.config import ClusterConfig
from electra_dist.engine.rank_environment import rank_place
from electra_dist.errors import StoreAway
from electra_dist.nvml import GpuReading, GpuSampler
from electra_dist.run.failures import Strike, add_strike
from electra_dist.run.heartbeat import Heartbeat, Phase, collective_limit_s
from electra_dist.run.this_node import node_name
from electra_dist.store.patience import WaitReporter

_LOOKS = 3  # log steps in a row at which a straggler must be slow
_COLLECTIVE_FACTOR = 2.0  # times the hang limit: a supervisor notices a hang first, and records the stacks
_LONGEST_COLLECTIVE_S = 3600.0
_STORAGE_MARGIN_S = 60.0  # by which a collective may outlast the longest wait for storage
_LEAST_CHANGE = 0.1  # fraction by which a timeout must change to be set again


@dataclass(frozen=True)
class RankObservation:
    """Result of a health check at a logged step: readings of this node's GPUs, and the slow ranks of the whole run."""

    gpu: GpuReading | None  # of this rank's node; None without GPUs, and on a rank that does not read them
    slow_ranks: list[int]  # slowest first


class RankMonitor:
    """Heartbeat and health checks of one rank, for the life of its process; the process group must exist.

    Call `began` when the number of this start of the run is known, `beat` at every step and change of phase, `look` at
    every logged step, and `close` when the run ends without an exception.
    """

    def __init__(self, run_dir: Path, cluster: ClusterConfig, wait_reporter: WaitReporter) -> None:
        """Write the first heartbeat and read the GPUs."""
        self._run_dir = run_dir
        self._cluster = cluster
        self._wait_reporter = wait_reporter
        self._least_collective_s = 0.0
        if cluster.storage_patience_s > 0:
            # Other ranks wait in a collective while one waits for storage, for as long as it may.
            self._least_collective_s = cluster.storage_patience_s + _STORAGE_MARGIN_S
        self._phase: Phase = "setup"  # the newest one apart from "storage"
        self._step = 0
        self._waits_for_storage = False
        self._heartbeat = Heartbeat(run_dir, dist.get_rank())
        is_first_on_node = rank_place().local_rank == 0
        self._sampler = GpuSampler.open() if is_first_on_node else None
        if self._sampler:
            self._sampler.read()  # memory errors up to now are not those of the run
        self._forward_times: deque[list[float]] = deque(maxlen=_LOOKS)  # of all ranks, one list per log step
        self._collective_limit_s = 0.0  # the timeout of collectives that is set; 0 before the first heartbeat
        self.sick = False  # whether this rank's node is not to be trusted
        self._wait_reporter.on_wait = self.waits_for_storage

    def began(self, attempt: int) -> None:
        """Set the number of this start of the run ("attempt"), from 1, which all later heartbeats contain."""
        self._heartbeat.attempt = attempt

    def beat(self, phase: Phase, step: int) -> None:
        """Write a heartbeat: `phase` of `step` begins now. Adapt the timeout of collectives to this phase."""
        self._phase = phase
        self._step = step
        self._waits_for_storage = False
        self._heartbeat.beat(phase, step, self._wait_reporter.reason)
        hang_limit_s = collective_limit_s(self._heartbeat.last, self._cluster)
        limit_s = max(min(_COLLECTIVE_FACTOR * hang_limit_s, _LONGEST_COLLECTIVE_S), self._least_collective_s)
        # The limit follows the measured step time. It is not worth setting the timeouts again for small changes.
        change_s = abs(limit_s - self._collective_limit_s)
        if change_s > _LEAST_CHANGE * self._collective_limit_s:
            self._collective_limit_s = limit_s
            for group in list(c10d._world.pg_map):  # DeepSpeed has a group of its own beside the default one
                c10d._set_pg_timeout(timedelta(seconds=limit_s), group)

    def waits_for_storage(self, reason: str) -> None:
        """Write a heartbeat that says why this rank waits for storage; if `reason` is "", the wait is over.

        Call it about every second while the training thread waits.
        """
        if reason:
            self._waits_for_storage = True
            self._heartbeat.beat("storage", self._step, reason)
        elif self._waits_for_storage:
            self._waits_for_storage = False
            self._heartbeat.beat(self._phase, self._step, self._wait_reporter.reason)

    def waits_for_thread(self, silent_s: float, subject: str, longest_s: float) -> None:
        """Report in the heartbeat that the training thread waits for the thread that reads rows or writes checkpoints.

        If the other thread is known to wait for storage, this is reported at once. Otherwise it may hang in a call to
        storage, so `longest_s` seconds without progress are reported as a wait for storage. `silent_s` is the time
        since its last progress. `subject` names what the training thread waits for, such as "the previous checkpoint".
        """
        if self._wait_reporter.reason:
            self.waits_for_storage(self._wait_reporter.reason)
        elif silent_s > longest_s:
            self.waits_for_storage(f"{subject}: no progress for {silent_s:.0f} s")
        elif self._phase != "step":  # in that phase, a heartbeat between two steps would shorten the measured time
            self._waits_for_storage = False
            self._heartbeat.beat(self._phase, self._step)

    @property
    def step_s(self) -> float | None:
        """Return the median seconds of the newest steps, as in the heartbeat; None until enough steps were timed."""
        return self._heartbeat.last.step_s

    def look(self, forward_s: float) -> RankObservation:
        """Read the GPUs of this node, and compare the forward times of all ranks. Collective; call it at logged steps.

        `forward_s` is the time of this rank's first forward pass. If the GPUs have gone bad, the node is recorded as
        faulty, once, and `sick` becomes True. All ranks return the same list of slow ranks.
        """
        self._forward_times.append(self._gather(forward_s))
        reading = self._sampler.read() if self._sampler else None
        reason = self._sampler.fault if self._sampler else ""
        if reason and not self.sick:
            self.sick = True
            strike = Strike(time=time.time(), node=node_name(), device="gpu", reason=reason, by="run")
            with contextlib.suppress(StoreAway):  # without the record, the run ends all the same
                add_strike(self._run_dir, strike)
        return RankObservation(reading, stragglers(list(self._forward_times), in_a_row=_LOOKS))

    @staticmethod
    def _gather(seconds: float) -> list[float]:
        """Return the `seconds` that each rank passes, in the order of ranks. Collective."""
        device = "cuda" if torch.cuda.is_available() else "cpu"  # NCCL gathers tensors on GPUs only
        own_time = torch.full((1,), seconds, dtype=torch.float64, device=device)
        time_W = own_time.new_empty(dist.get_world_size())
        dist.all_gather_into_tensor(time_W, own_time)
        times: list[float] = time_W.tolist()
        return times

    def close(self) -> None:
        """Write the last heartbeat, "done", so that a supervisor stops watching this rank; close the GPU driver.

        Do not call this after an exception: the supervisor must see that the rank did not finish.
        """
        self._heartbeat.close()
        if self._sampler:
            self._sampler.close()


def stragglers(looks: Sequence[Sequence[float]], *, factor: float = 1.2, in_a_row: int = 3) -> list[int]:
    """Return the ranks that took more than `factor` times the median time in each of the last `in_a_row` measurements.

    An element of `looks` is a measurement: for each rank, the seconds of its own work up to the first collective. The
    newest is the last one. The result begins with the slowest rank; it is [] if there are too few measurements. With
    two ranks the median is the mean of both, so the factor must be below 2.
    """
    last_looks = looks[-in_a_row:]
    if len(last_looks) < in_a_row:
        return []
    num_ranks = len(last_looks[0])
    always_slow = set(range(num_ranks))  # ranks that were slow in each look so far
    for times in last_looks:
        assert len(times) == num_ranks, "looks differ in their number of ranks; pass one time per rank"
        limit_s = factor * statistics.median(times)
        always_slow &= {rank for rank, seconds in enumerate(times) if seconds > limit_s}
    newest_times = last_looks[-1]
    return sorted(always_slow, key=lambda rank: -newest_times[rank])  # slowest first
