"""Which ranks hang: those whose last heartbeat is older than the limit of their phase.

Guarantee: `hung` is a pure function of the heartbeats and the clock. The limit of a step is learned from the
rank's own steps; the other phases have theirs in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Beat, Phase


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Seconds without a beat after which a rank counts as hung."""

    setup_s: float = 1800.0  # start, restore, first shards; also the exempt first steps
    step_factor: float = 5.0  # times the learned step time ...
    step_floor_s: float = 30.0  # ... but never less: a step may wait for a shard
    checkpoint_s: float = 600.0
    eval_s: float = 600.0

    def of(self, beat: Beat) -> float:
        """The limit of the phase that a rank is in."""
        if beat.phase == "step" and beat.step_s is not None:
            return max(self.step_floor_s, self.step_factor * beat.step_s)
        return {"checkpoint": self.checkpoint_s, "eval": self.eval_s, "done": float("inf")}.get(
            beat.phase, self.setup_s
        )

    def of_its_collective(self, beat: Beat) -> float:
        """The same for who cannot see the other ranks, one of which may still be in the phase before (see `hung`)."""
        first_after_another = beat.phase == "step" and beat.time == beat.phase_since and beat.step_s is not None
        return max(self.of(beat), self.checkpoint_s, self.eval_s) if first_after_another else self.of(beat)


def hang_limits(cluster: ClusterConfig) -> HangLimits:
    """What the config says."""
    return HangLimits(
        setup_s=cluster.hang_setup_s,
        step_factor=cluster.hang_step_factor,
        step_floor_s=cluster.hang_step_floor_s,
        checkpoint_s=cluster.hang_checkpoint_s,
        eval_s=cluster.hang_eval_s,
    )


@dataclass(frozen=True, kw_only=True)
class Hung:
    """A rank that has been silent for too long."""

    rank: int
    host: str  # "" when the rank never beat
    phase: Phase
    step: int
    quiet_s: float
    limit_s: float


def hung(
    heartbeats: Iterable[Beat],
    now: float,
    limits: HangLimits,
    *,
    started: float = 0.0,
    ranks: Iterable[int] = (),
    everyone: Callable[[], Iterable[Beat]] = tuple,
) -> list[Hung]:
    """The hung ranks, the likely culprit first: fewest steps done, then longest silent (the others wait for it).

    The first step after another phase waits in its first collective for ranks that are still in that phase, as rank 0
    may be while an earlier checkpoint is being written: as long as there is one, its limit counts.

    Args:
        everyone: reads the beats of all nodes' ranks; asked only about such a first step.
        now: Unix time.
        started: when the ranks were started; older beats are of an earlier start and do not count.
        ranks: ranks that must exist; one that has not beaten since `started` is in setup since then.
    """
    current = {beat.rank: beat for beat in heartbeats if beat.time >= started}
    silent = []
    for b in current.values():
        since, limit_s = b.time, limits.of(b)
        if b.phase == "step" and b.time == b.phase_since and now - since > limit_s:
            others = [other for other in everyone() if other.attempt == b.attempt]
            since = max([since, *(other.phase_since for other in others)])
            limit_s = max([limit_s, *(limits.of(other) for other in others if other.phase in ("checkpoint", "eval"))])
        silent.append(Hung(rank=b.rank, host=b.host, phase=b.phase, step=b.step, quiet_s=now - since, limit_s=limit_s))
    silent += [
        Hung(rank=rank, host="", phase="setup", step=0, quiet_s=now - started, limit_s=limits.setup_s)
        for rank in ranks
        if rank not in current
    ]
    return sorted((h for h in silent if h.quiet_s > h.limit_s), key=lambda h: (h.step, -h.quiet_s, h.rank))
