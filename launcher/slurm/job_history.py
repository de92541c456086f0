"""Describe the Slurm jobs of a run's newest submission: what became of each, and why a run waits or has not begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import start_identity
from launcher.slurm.slurm_queue import QueueView

# Slurm's reason for a waiting job -> what it means for a run.
_REASONS = {
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
    """One start of the ranks by a job of a run: when it began, and its verdict.

    A job has several if Slurm has requeued it, or if spare nodes have replaced others in it.
    """

    job: str  # Slurm's job id
    restart: int  # how often Slurm had requeued it
    replacements: int  # how often spare nodes had replaced others since then
    began: str  # ISO 8601
    ended: str | None  # None: it runs, or it ended without a verdict
    verdict: str | None  # the action that followed, see launcher/slurm/job.py
    why: str

    def described(self, is_running: bool) -> str:
        """Return the link as one line, for example "4711, requeued 2 times: next: stopped on purpose at step 700".

        Args:
            is_running: whether Slurm's queue has the job as running.
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
    """Return the jobs that have begun since the newest submission, oldest first. Pure.

    Args:
        jobs: all lines of jobs.jsonl, oldest first.
    """
    newest = [number for number, record in enumerate(jobs) if record["event"] == "submit"]
    recent = jobs[newest[-1] :] if newest else jobs
    ends = {start_identity(record): record for record in recent if record["event"] == "end"}
    links = []
    for record in recent:
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
    """Return why the next job of a run has not started: Slurm's reason, its meaning, and the last verdict. Pure.

    Args:
        queue: the run's jobs in the queue; at least one does not run.
        jobs: all lines of jobs.jsonl, oldest first.
    """
    waiting = [job for job in queue.jobs if job.state != "RUNNING"]
    # A job that only waits for another one of the run says least.
    first = next((job for job in waiting if job.reason != "Dependency"), waiting[0])
    meaning = _REASONS.get(first.reason)
    reason = f"{first.reason}: {meaning}" if meaning else first.reason
    links = links_of(jobs)
    if links and links[-1].verdict is not None:
        return f"{reason}; the last job: {links[-1].why}"
    return reason


def why_not_begun(queue: QueueView | None, jobs: Sequence[Record]) -> str:
    """Return why a run has no event and no sign of life, as far as it can be known. Pure.

    Args:
        queue: the run's jobs in the queue; None without Slurm, or if it does not answer.
        jobs: all lines of jobs.jsonl, oldest first.
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
