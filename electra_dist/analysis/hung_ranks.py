"""Detect hung ranks: a rank is hung if its last heartbeat is older than the limit of the phase that it is in.

A heartbeat is a small record that each rank writes at every step and at every change of its phase. It contains the
phase: setup, step, checkpoint, eval, storage or done. In phase storage a rank waits for storage that is full or away.

Guarantee: `hung` is a pure function of its arguments. The limit of a step is a multiple of the rank's own step time,
which is measured during the run; the other phases have fixed limits in seconds.

All times are seconds of one clock, that of the heartbeats. Heartbeats have Unix times; the supervisor, which must not
be misled by a wall clock that jumps, first translates them to its monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Beat, Phase

# Added to the patience with storage: a try of an S3 request that has begun may end after the patience does.
STORAGE_MARGIN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Seconds without a heartbeat, in each phase, after which a rank counts as hung."""

    setup_s: float = 1800.0  # start, restore, first shards; also the first steps, whose time is not learned
    step_factor: float = 5.0  # limit of a step as a multiple of the learned step time ...
    step_floor_s: float = 30.0  # ... but at least this, because a step may wait for a shard
    checkpoint_s: float = 600.0
    eval_s: float = 600.0
    storage_s: float = 900.0 + STORAGE_MARGIN_S  # a wait for storage, counted from its start, not the last heartbeat

    def of(self, beat: Beat) -> float:
        """Return the seconds for which a rank may be silent after heartbeat `beat`; infinity if the rank is done."""
        if beat.phase == "done":
            return float("inf")
        if beat.phase == "storage":
            return self.storage_s
        if beat.phase == "checkpoint":
            return self.checkpoint_s
        if beat.phase == "eval":
            return self.eval_s
        if beat.phase == "step" and beat.step_s is not None:
            return max(self.step_floor_s, self.step_factor * beat.step_s)
        return self.setup_s

    def of_its_collective(self, beat: Beat) -> float:
        """Return the seconds that a collective of all ranks may take, given the newest heartbeat of one rank.
        The first step after a checkpoint or evaluation gets the longest limit: others may still be busy with these.
        """
        if _is_first_of_step_phase(beat) and beat.step_s is not None:
            return max(self.of(beat), self.checkpoint_s, self.eval_s)
        return self.of(beat)


def hang_limits(cluster: ClusterConfig) -> HangLimits:
    """Return the limits that the config sets in section `cluster`: keys `hang_...` and `storage_patience_s`."""
    return HangLimits(
        setup_s=cluster.hang_setup_s,
        step_factor=cluster.hang_step_factor,
        step_floor_s=cluster.hang_step_floor_s,
        checkpoint_s=cluster.hang_checkpoint_s,
        eval_s=cluster.hang_eval_s,
        storage_s=cluster.storage_patience_s + STORAGE_MARGIN_S,
    )


@dataclass(frozen=True, kw_only=True)
class Hung:
    """Silence of a rank, and the limit for it; the function `hung` returns only silences above their limit."""

    rank: int
    host: str  # "" if the rank never sent a heartbeat
    phase: Phase
    step: int  # optimizer steps done
    quiet_s: float  # seconds without a heartbeat
    limit_s: float  # the limit that they exceed

    @property
    def is_too_long(self) -> bool:
        """Return whether the rank has been silent for longer than its limit allows."""
        return self.quiet_s > self.limit_s


def hung(
    heartbeats: Iterable[Beat],
    now: float,
    limits: HangLimits,
    *,
    started: float = 0.0,
    ranks: Iterable[int] = (),
    read_all_beats: Callable[[], Iterable[Beat]] = tuple,
    not_before: float = float("-inf"),
) -> list[Hung]:
    """Return the hung ranks, the likely culprit first: by fewest steps, then by longest silence.
    Other ranks usually wait for the culprit in a collective. A rank above its own limit may wait for ranks that have
    made no more steps, or that wait for storage. It counts as hung only if all these ranks have been silent, too, for
    the longest of their limits. For this check `read_all_beats` returns the heartbeats of all nodes; it is called at
    most once, and only if a rank exceeds its own limit.
    Heartbeats before `started` are ignored; a rank of `ranks` without a newer one counts as in setup since `started`.
    Time before `not_before`, until which no heartbeat could be written, does not count as silence.
    """
    beat_of_rank = {beat.rank: beat for beat in heartbeats if beat.time >= started}
    own_silences = {beat.rank: _own_silence(beat, now, limits, not_before) for beat in beat_of_rank.values()}
    has_silent_rank = any(silence.is_too_long for silence in own_silences.values())
    all_beats = list(read_all_beats()) if has_silent_rank else []
    silences = []
    for rank, silence in own_silences.items():
        if silence.is_too_long:
            silence = _silence_among_others(beat_of_rank[rank], all_beats, now, limits, not_before)
        silences.append(silence)
    for rank in ranks:
        if rank not in beat_of_rank:
            quiet_s = now - max(started, not_before)
            missing_rank = Hung(rank=rank, host="", phase="setup", step=0, quiet_s=quiet_s, limit_s=limits.setup_s)
            silences.append(missing_rank)
    hung_ranks = [silence for silence in silences if silence.is_too_long]
    return sorted(hung_ranks, key=lambda silence: (silence.step, -silence.quiet_s, silence.rank))


def _own_silence(beat: Beat, now: float, limits: HangLimits, not_before: float) -> Hung:
    return _silence_among_others(beat, (), now, limits, not_before)


def _silence_among_others(
    beat: Beat, all_beats: Iterable[Beat], now: float, limits: HangLimits, not_before: float
) -> Hung:
    """Return how long a rank and all ranks that it may wait for have all been silent, and their longest limit."""
    waited_for = [other for other in all_beats if other.attempt == beat.attempt and _may_wait_for(beat, other)]
    considered = [beat, *waited_for]
    silent_since = max(_silent_since(considered_beat) for considered_beat in considered)
    limit_s = max(limits.of(considered_beat) for considered_beat in considered)
    return Hung(
        rank=beat.rank,
        host=beat.host,
        phase=beat.phase,
        step=beat.step,
        quiet_s=now - max(silent_since, not_before),
        limit_s=limit_s,
    )


def _may_wait_for(beat: Beat, other: Beat) -> bool:
    """Return whether a rank may wait for rank `other`, which waits for storage itself or is neither done nor ahead."""
    # The heartbeats of a rank in phase "storage" may come late, so it counts in any case.
    return other.phase == "storage" or (other.phase != "done" and other.step <= beat.step)


def _silent_since(beat: Beat) -> float:
    # A rank that waits for storage goes on sending heartbeats: only the length of the wait shows that it hangs.
    return beat.phase_since if beat.phase == "storage" else beat.time


def _is_first_of_step_phase(beat: Beat) -> bool:
    """Return whether the rank has completed no step since it entered the phase "step"."""
    return beat.phase == "step" and beat.time == beat.phase_since
