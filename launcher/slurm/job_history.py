"""Describe a run's Slurm jobs since its newest submission: how each ended, and why the run waits or has not begun.

Guarantee: all functions are pure. Callers pass the records of jobs.jsonl, which has a line for each submission and for
each begin and end of a job, and the view of Slurm's queue (slurm_queue.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import start_identity
from launcher.slurm.slurm_queue import QueueView

# Slurm's reason for which a job waits -> what it means for a run.
_MEANING_OF_REASON = {
    "Dependency": "the job before it has not ended",
    "BeginTime": "its begin time has not come: after a requeue, or ten minutes after storage stayed away",
    "Resources": "no free nodes",
    "Priority": "other jobs come first",
    "ReqNodeNotAvail": "nodes that it needs are out of service or reserved",
    "PartitionTimeLimit": "--time is longer than the partition allows",
    "AssocGrpCpuLimit": "the account's limit is used up",
    "PartitionDown": "the partition is down",
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """One start of a run's ranks by a Slurm job: when it began, when it ended, and how the run went on.

    A job starts the ranks again if Slurm has requeued it, or if spare nodes have replaced other nodes in it.
    """

    job: str  # Slurm's job id
    restart: int  # how often Slurm had requeued the job
    replacements: int  # how often spare nodes had replaced other nodes since the last requeue
    began: str  # ISO 8601
    ended: str | None  # ISO 8601; None: the job runs, or it ended without a verdict
    verdict: str | None  # action that followed, such as "next" (job_verdict.py lists them); None: see `ended`
    why: str  # reason of the verdict; "" without one

    def described(self, is_running: bool) -> str:
        """Return one line about this start, such as "4711, requeued 2 times: next: stopped on purpose at step 700".

        `is_running` says whether the job runs now, according to Slurm's queue. It matters only for a job without a
        recorded verdict.
        """
        name = self.job
        if self.restart:
            name += f", requeued {self.restart} times"
        if self.replacements:
            name += f", nodes replaced {self.replacements} times"
        if self.verdict is not None:
            return f"{name}: {self.verdict}: {self.why}"
        if is_running:
            return f"{name}: runs"
        return f"{name}: ended without a verdict: its first node failed, or the job was killed"


def links_of(jobs: Sequence[Record]) -> list[Link]:
    """List, oldest first, each start of the ranks by a Slurm job since the newest submission. Pure."""
    submissions = [number for number, record in enumerate(jobs) if record["event"] == "submit"]
    records = jobs[submissions[-1] :] if submissions else jobs  # since the newest submission
    ends = {start_identity(record): record for record in records if record["event"] == "end"}
    links = []
    for record in records:
        if record["event"] != "begin":
            continue
        end = ends.get(start_identity(record))
        links.append(
            Link(
                job=record["job"],
                restart=record["restart"],
                replacements=record.get("replacements", 0),
                began=record["time"],
                ended=end["time"] if end else None,
                verdict=end["verdict"] if end else None,
                why=end.get("why", "") if end else "",
            )
        )
    return links


def why_waiting(queue: QueueView, jobs: Sequence[Record]) -> str:
    """Return why a run's next job has not started: Slurm's reason, what it means, and how the last job ended. Pure.

    `queue` must hold at least one job that is not running.
    """
    waiting = [job for job in queue.jobs if job.state != "RUNNING"]
    # "Dependency" only means that a job waits for another job of the run, so any other reason explains more.
    next_job = next((job for job in waiting if job.reason != "Dependency"), waiting[0])
    meaning = _MEANING_OF_REASON.get(next_job.reason)
    reason = f"{next_job.reason}: {meaning}" if meaning else next_job.reason
    links = links_of(jobs)
    if links and links[-1].verdict is not None:
        return f"{reason}; the last job: {links[-1].why}"
    return reason


def why_not_begun(queue: QueueView | None, jobs: Sequence[Record]) -> str:
    """Return the likely reason why the ranks of a run have recorded nothing yet, as one line. Pure.

    Call it only for a run without events, without heartbeats and without jobs in the queue. A `queue` of None means
    that there is no Slurm, or that Slurm does not answer.
    """
    submitted = [job for record in jobs if record["event"] == "submit" for job in record.get("jobs", [])]
    if not submitted:
        return "it was never submitted, and no start has written a record"
    links = links_of(jobs)
    if links:
        verdict = links[-1].why or "it ended without a verdict"
        return f"job {links[-1].job} began, and no rank has written a record: {verdict}; see its log in slurm/"
    if queue is None:
        return f"jobs {', '.join(submitted)} were submitted, and Slurm does not answer"
    return (
        f"jobs {', '.join(submitted)} are not in the queue any more, and none has begun: see `sacct -j {submitted[0]}`"
    )
