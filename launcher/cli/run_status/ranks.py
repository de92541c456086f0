"""Find the ranks of a run that hang or wait for storage, and describe them for `electra-dist status`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Beat, Hung, hang_limits, hung
from electra_dist.run.number_formats import format_duration

_RANKS_SHOWN = 4  # The first one is the likely culprit; the others usually wait for it.


def hung_ranks(beats: Sequence[Beat], now: float, cluster: ClusterConfig) -> list[Hung]:
    """Return the hung ranks of a living run at Unix time `now`, the likely culprit first.

    A rank is hung if its last heartbeat is older than the limit of its phase in the config section `cluster`. The
    culprit is probably the rank with the fewest steps, because the others wait for it. Heartbeats of earlier starts of
    the run do not count.
    """
    newest_beats = _of_newest_attempt(beats)
    return hung(newest_beats, now, hang_limits(cluster), all_beats=newest_beats)


def hung_rank_lines(ranks: Sequence[Hung]) -> list[str]:
    """Return a line of the status page for each hung rank, but only for the first four."""
    return [
        f"  silent      rank {rank.rank} on {rank.host}: {rank.phase} {rank.step:,}, {rank.quiet_s:.0f} s"
        for rank in ranks[:_RANKS_SHOWN]
    ]


def waits_for_storage(run: Path, disk_problem: str, beats: Sequence[Beat], now: float) -> list[dict[str, Any]]:
    """Return a JSON object for each rank of a living run that waits for storage; usually an empty list.

    Each object has the keys "rank", "host", "reason", "is_training" (False if the training itself waits, True if only
    a write in the background waits) and "for_s" (seconds for which the training has waited; None if it goes on). If
    the run folder cannot be written, no rank can report a wait; an object with rank None then stands for the folder.
    """
    waits: list[dict[str, Any]] = []
    if disk_problem:
        waits.append(
            {"rank": None, "host": "", "reason": f"{run}: {disk_problem}", "is_training": True, "for_s": None}
        )
    for beat in _of_newest_attempt(beats):
        if not beat.reason:
            continue
        is_training = beat.phase != "storage"
        for_s = None if is_training else now - beat.phase_since
        wait = {
            "rank": beat.rank,
            "host": beat.host,
            "reason": beat.reason,
            "is_training": is_training,
            "for_s": for_s,
        }
        waits.append(wait)
    return waits


def storage_lines(waits: Sequence[dict[str, Any]], patience_s: float) -> list[str]:
    """Return a line of the status page for each of the first four waits. `patience_s` is the longest wait allowed."""
    page_lines = []
    for wait in waits[:_RANKS_SHOWN]:
        who = "the run folder" if wait["rank"] is None else f"rank {wait['rank']} on {wait['host']}"
        state = "has unwritten records or checkpoints, and trains on"
        if wait["rank"] is None:
            state = "takes no records"
        elif not wait["is_training"]:
            remaining_s = max(0.0, patience_s - wait["for_s"])
            state = f"waits for {format_duration(wait['for_s'])}, at most {format_duration(remaining_s)} more"
        page_lines.append(f"  storage     {who} {state}: {wait['reason']}")
    return page_lines


def _of_newest_attempt(beats: Sequence[Beat]) -> list[Beat]:
    newest_attempt = max((beat.attempt for beat in beats), default=0)
    return [beat for beat in beats if beat.attempt == newest_attempt]
