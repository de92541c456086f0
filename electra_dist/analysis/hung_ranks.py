"""Detect hung ranks: a rank is hung if its last heartbeat is older than the limit of the phase that it is in.

The phases are setup, step, checkpoint, eval and done; each heartbeat contains the phase.

Guarantee: `hung` is a pure function of the heartbeats and the clock. The limit of a step is a multiple of the rank's
own, learned step time; the other phases have fixed limits in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Beat, Phase


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Limits for the silence of a rank: seconds without a heartbeat, in each phase, after which it counts as hung.

    A rank writes the phase that it is in (setup, step, checkpoint, eval or done) into each of its heartbeats.
    """

    setup_s: float = 1800.0  # start, restore, first shards; also the first steps, whose time is not learned
    step_factor: float = 5.0  # limit of a step as a multiple of the learned step time ...
    step_floor_s: float = 30.0  # ... but at least this, because a step may wait for a shard
    checkpoint_s: float = 600.0
    eval_s: float = 600.0

    def of(self, beat: Beat) -> float:
        """Return the seconds for which a rank may be silent after a heartbeat; infinity if it is done.

        In a step the limit is a multiple of the rank's own step time. The first steps have the limit of the setup,
        because their time is not learned yet.

        Args:
            beat: the newest heartbeat of the rank.
        """
        if beat.phase == "done":
            return float("inf")
        if beat.phase == "checkpoint":
            return self.checkpoint_s
        if beat.phase == "eval":
            return self.eval_s
        if beat.phase == "step" and beat.step_s is not None:
            return max(self.step_floor_s, self.step_factor * beat.step_s)
        return self.setup_s

    def of_its_collective(self, beat: Beat) -> float:
        """Return the seconds that a collective may take, as far as the rank that sent `beat` can know.

        This is the limit of the rank's phase, except in the first step after a checkpoint or an evaluation: another
        rank may still be in that phase, so the longest of the three limits applies.

        Args:
            beat: the newest heartbeat of the rank.
        """
        if _is_first_of_step_phase(beat) and beat.step_s is not None:
            return max(self.of(beat), self.checkpoint_s, self.eval_s)
        return self.of(beat)


def hang_limits(cluster: ClusterConfig) -> HangLimits:
    """Return the limits that the keys `hang_...` in the `cluster` section of the config set, in seconds."""
    return HangLimits(
        setup_s=cluster.hang_setup_s,
        step_factor=cluster.hang_step_factor,
        step_floor_s=cluster.hang_step_floor_s,
        checkpoint_s=cluster.hang_checkpoint_s,
        eval_s=cluster.hang_eval_s,
    )


@dataclass(frozen=True, kw_only=True)
class Hung:
    """A rank that sent no heartbeat for longer than the limit of its phase."""

    rank: int
    host: str  # "" if the rank never sent a heartbeat
    phase: Phase
    step: int  # optimizer steps done
    quiet_s: float  # seconds without a heartbeat
    limit_s: float  # the limit that they exceed


def hung(
    heartbeats: Iterable[Beat],
    now: float,
    limits: HangLimits,
    *,
    started: float = 0.0,
    ranks: Iterable[int] = (),
    everyone: Callable[[], Iterable[Beat]] = tuple,
) -> list[Hung]:
    """Return the hung ranks, the likely culprit first: ordered by fewest steps, then by longest silence.

    The other hung ranks usually wait for the culprit in a collective.

    In the first step after a checkpoint or an evaluation, a rank waits in its first collective for ranks that are
    still in that phase (for example for rank 0 while it writes a checkpoint). As long as one of them is, the limit of
    that phase applies to the waiting rank, too.

    Args:
        heartbeats: newest heartbeat of each rank to judge.
        now: Unix time in seconds.
        limits: the longest silence that each phase allows.
        started: Unix time at which the ranks were started; older heartbeats are of an earlier start and are ignored.
        ranks: ranks that must exist; a rank without a heartbeat since `started` counts as being in setup since then.
        everyone: reads the heartbeats of the ranks of all nodes; called only if a rank exceeds its limit in the first
            step after a checkpoint or an evaluation. The default returns none.
    """
    beat_of_rank = {beat.rank: beat for beat in heartbeats if beat.time >= started}
    silences = [_silence(beat, now, limits, everyone) for beat in beat_of_rank.values()]
    for rank in ranks:
        if rank not in beat_of_rank:
            silences.append(
                Hung(rank=rank, host="", phase="setup", step=0, quiet_s=now - started, limit_s=limits.setup_s)
            )
    hung_ranks = [silence for silence in silences if silence.quiet_s > silence.limit_s]
    return sorted(hung_ranks, key=lambda silence: (silence.step, -silence.quiet_s, silence.rank))


def _silence(beat: Beat, now: float, limits: HangLimits, everyone: Callable[[], Iterable[Beat]]) -> Hung:
    """Return how long a rank has been silent, and its limit, whether or not the limit is exceeded.

    In the first step after a checkpoint or an evaluation, the silence counts from the moment at which the last rank
    changed its phase, and ranks that are still in that phase raise the limit.

    Args:
        beat: the newest heartbeat of the rank.
        now: Unix time in seconds.
        limits: the longest silence that each phase allows.
        everyone: reads the heartbeats of the ranks of all nodes.
    """
    silent_since = beat.time
    limit_s = limits.of(beat)
    exceeds_own_limit = now - silent_since > limit_s
    if exceeds_own_limit and _is_first_of_step_phase(beat):
        # It may wait for ranks in a checkpoint or evaluation. Heartbeats of an earlier attempt do not count.
        all_beats = [other for other in everyone() if other.attempt == beat.attempt]
        busy_beats = [other for other in all_beats if other.phase in ("checkpoint", "eval")]
        silent_since = max([silent_since, *(other.phase_since for other in all_beats)])
        limit_s = max([limit_s, *(limits.of(other) for other in busy_beats)])
    return Hung(
        rank=beat.rank,
        host=beat.host,
        phase=beat.phase,
        step=beat.step,
        quiet_s=now - silent_since,
        limit_s=limit_s,
    )


def _is_first_of_step_phase(beat: Beat) -> bool:
    """Return whether a heartbeat is the first one that its rank sent after it entered the phase "step"."""
    return beat.phase == "step" and beat.time == beat.phase_since
