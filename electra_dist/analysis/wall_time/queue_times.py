"""Computes how long a run waited for nodes in Slurm's queue, and how long its jobs took to start the ranks.

Guarantee: pure functions of the ledger and of the job records in slurm/jobs.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from electra_dist.analysis.wall_time.run_starts import RunStart, start_indexes, time_of
from electra_dist.run.jsonl import Record


def queue_and_boot_of_starts(
    ledger: Sequence[Record], jobs: Sequence[Record], starts: Sequence[RunStart]
) -> list[tuple[float, float]]:
    """Return, for each start of the ranks, the seconds that it waited for nodes and then booted: (queue, boot).

    Each job's "begin" record in jobs.jsonl holds the number of events that the ledger had when the job began. The job
    led to the first start whose start event was written to the ledger after those events. For example, a job that
    began when the ledger had 7 events led to the start whose event is the next "start" or "resume" from index 7 on.

    Args:
        ledger: events of ledger.jsonl, oldest first.
        jobs: records of slurm/jobs.jsonl, oldest first.
        starts: all starts of the ledger, see `starts_of`.
    """
    begins = [job for job in jobs if job["event"] == "begin"]
    queue_and_boot_s = []
    previous_index = -1
    previous_end = -math.inf
    for start, index in zip(starts, start_indexes(ledger), strict=True):
        own_begins = [job for job in begins if previous_index < job["ledger_events"] <= index]
        queue_and_boot_s.append(_queue_and_boot(own_begins, previous_end, start.began))
        previous_index = index
        previous_end = start.last
    return queue_and_boot_s


def _queue_and_boot(begins: Sequence[Record], previous_end: float, process_began: float) -> tuple[float, float]:
    """Return how long one start of the ranks waited for nodes, and how long it then booted: (queue, boot) in seconds.

    Usually one Slurm job leads to one start of the ranks: `queue` is the time from its submission until the job began,
    and `boot` is the time from then until the Python process began. Several jobs come before one start if the earlier
    ones ended before their ranks started. `queue` is then the sum over these jobs, and `boot` is that of the last job.

    Args:
        begins: "begin" records of these jobs in slurm/jobs.jsonl, oldest first; without any the result is (0, 0).
        previous_end: Unix time of the last event of the previous start, before which no waiting is counted; -infinity
            for the first start.
        process_began: Unix time at which the Python process of this start began.
    """
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
    """Return the Unix time at which the first Slurm job of the run was submitted; infinity if no job began.

    If Slurm did not report when a job was submitted, the time at which it began counts instead.

    Args:
        jobs: records of slurm/jobs.jsonl; those of the kind "begin" hold the time of submission.
    """
    return min((_submitted_and_began(job)[0] for job in jobs if job["event"] == "begin"), default=math.inf)


def _submitted_and_began(begin: Record) -> tuple[float, float]:
    """Return the Unix times at which a Slurm job was submitted, and at which it began.

    If Slurm did not report when the job began, the time of the record is used, because the job's script writes it
    first of all. If Slurm did not report the submission, the job counts as submitted when it began, without any
    waiting.

    Args:
        begin: the "begin" record of the job in slurm/jobs.jsonl.
    """
    job_began = _seconds(begin.get("started"))
    if job_began is None:
        job_began = time_of(begin)
    submitted = _seconds(begin.get("submitted"))
    if submitted is None:
        submitted = job_began
    return submitted, job_began


def _seconds(time: str | None) -> float | None:
    """Convert an ISO 8601 time to Unix seconds; return None if the time is None, which means not recorded."""
    return None if time is None else datetime.fromisoformat(time).timestamp()
