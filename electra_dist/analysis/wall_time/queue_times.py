"""Compute how long a run waited for nodes in Slurm's queue, and how long its jobs took to start the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from electra_dist.analysis.wall_time.run_starts import RunStart, start_indexes, time_of
from electra_dist.run.jsonl import Record


def queue_and_boot_of_starts(
    ledger: Sequence[Record], jobs: Sequence[Record], starts: Sequence[RunStart]
) -> list[tuple[float, float]]:
    """Return for each start of the run (seconds in Slurm's queue, seconds from begin of the job to the process)."""
    begins = [job for job in jobs if job["event"] == "begin"]
    queue_and_boot_s = []
    previous_index = -1
    previous_end = -math.inf
    for start, index in zip(starts, start_indexes(ledger), strict=True):
        # A job led to the first start event after the number of events that the ledger had when it began.
        own_begins = [job for job in begins if previous_index < job["ledger_events"] <= index]
        queue_and_boot_s.append(_queue_and_boot(own_begins, previous_end, start.began))
        previous_index = index
        previous_end = start.last
    return queue_and_boot_s


def _queue_and_boot(begins: Sequence[Record], previous_end: float, process_began: float) -> tuple[float, float]:
    """Return (queue seconds of all jobs that led to one start, seconds from the last job's begin to the process)."""
    queue_s = 0.0
    boot_s = 0.0
    busy_until = previous_end  # until then the run was not waiting, even if the next job was in the queue already
    for job in begins:
        submitted, job_began = _submitted_and_began(job)
        waiting_since = max(submitted, busy_until)
        queue_s += max(0.0, job_began - waiting_since)
        boot_s = max(0.0, process_began - job_began)  # replaced by each later job: only the last started the process
        busy_until = time_of(job)  # the run held the nodes of this job, so the wait for the next one began later
    return queue_s, boot_s


def first_submission(jobs: Sequence[Record]) -> float:
    """Return the Unix time at which the first job was submitted (or began, if unknown); infinity if none began."""
    return min((_submitted_and_began(job)[0] for job in jobs if job["event"] == "begin"), default=math.inf)


def _submitted_and_began(begin: Record) -> tuple[float, float]:
    """Return the Unix times at which a job was submitted and began; the next known time replaces a missing one."""
    job_began = _seconds(begin.get("started"))
    if job_began is None:
        job_began = time_of(begin)
    submitted = _seconds(begin.get("submitted"))
    if submitted is None:
        submitted = job_began
    return submitted, job_began


def _seconds(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()
