"""Explain the state of a run, and suggest the commands to run next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from electra_dist.run.folder import CONFIG_FILE, LOG_FILE, SLURM_DIR, STOP_FILE
from electra_dist.run.history import links, since_submission, starts
from electra_dist.run.ledger import JobEnded, JobRecord, JobSubmitted, LedgerEvent
from electra_dist.run.number_formats import format_duration
from launcher.cli.run_status.snapshot import RunSnapshot
from launcher.slurm.slurm import QueueView

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


def reason_of_state(snapshot: RunSnapshot) -> str:
    """Return why the run is in its state, such as "stop: SIGTERM, 50s ago"; "" for a living or finished run."""
    state = snapshot.state
    if state in ("stopped", "dead"):
        # The verdict on the last job explains more than the last event, unless the run was continued without Slurm.
        newest_job = snapshot.jobs[-1] if snapshot.jobs else None
        if isinstance(newest_job, JobEnded) and newest_job.why:
            was_continued = bool(starts(snapshot.ledger[newest_job.ledger_events :]))
            if not was_continued:
                return newest_job.why
        if snapshot.ledger:
            return _describe_event(snapshot, snapshot.ledger[-1])
    if state in ("held", "waiting") and snapshot.queue:
        return _why_waiting(snapshot.queue, snapshot.jobs)
    if state == "not begun":
        return _why_not_begun(snapshot.queue, snapshot.jobs)
    return ""


def next_commands(snapshot: RunSnapshot) -> list[str]:
    """Return the shell commands that the status page suggests for the state of the run.

    Alternatives begin with the most useful one; commands that belong together are in the order in which to run them.
    """
    run = shlex.quote(str(snapshot.run))
    if snapshot.state == "finished":
        return [f"electra-dist export {run}", f"electra-dist report {run}"]
    if snapshot.state == "living":
        job_id = snapshot.running_job_id
        log = f"{run}/{SLURM_DIR}/job-{job_id}.log" if job_id else f"{run}/{LOG_FILE}"
        return [f"tail -f {log}", f"touch {run}/{STOP_FILE}    # saves and stops"]
    if snapshot.state == "waiting":
        return [f"squeue --start --name={snapshot.job_name}"]
    if snapshot.state == "held" and snapshot.queue:
        resume_nodes = [f"scontrol update nodename={out.node} state=resume" for out in snapshot.nodes_out]
        release_jobs = [f"scontrol release {job.job}" for job in snapshot.queue.jobs if job.is_held]
        return resume_nodes + release_jobs
    # The run does not run: start it again, in the way in which it was started before.
    if snapshot.submitted_by:
        look = f"squeue --name={snapshot.job_name}    # if it lists a job, do not submit another one"
        return [look, snapshot.submitted_by] if snapshot.queue_is_unknown else [snapshot.submitted_by]
    # Another number of ranks reads the same rows, but its sums are rounded in another order.
    return _start_with_the_same_ranks(snapshot)


def _start_with_the_same_ranks(snapshot: RunSnapshot) -> list[str]:
    """Return the commands that start the run again with as many ranks on each host as at its last start."""
    run = shlex.quote(str(snapshot.run))
    program = f"--module launcher.pretrain --config {run}/{CONFIG_FILE}"
    if len(snapshot.ranks_of_hosts) > 1:
        lines = [f"{host} slots={num_ranks}" for host, num_ranks in snapshot.ranks_of_hosts.items()]
        write_hostfile = f"printf '%s\\n' {shlex.join(lines)} > {run}/hostfile"
        return [write_hostfile, f"deepspeed --hostfile {run}/hostfile {program}"]
    num_ranks = sum(snapshot.ranks_of_hosts.values())
    return [f"deepspeed --num_gpus {num_ranks} {program}" if num_ranks else f"deepspeed {program}"]


def _describe_event(snapshot: RunSnapshot, event: LedgerEvent) -> str:
    """Return the name, reason and age of a ledger event as text, for example "stop: SIGTERM, 50s ago"."""
    age = format_duration(snapshot.age_s(event))
    if event.why:
        return f"{event.event}: {event.why}, {age} ago"
    return f"{event.event}, {age} ago"


def _why_waiting(queue: QueueView, jobs: Sequence[JobRecord]) -> str:
    """Return why a run's next job has not started: Slurm's reason, what it means, and how the last job ended.

    `queue` must hold at least one job that is not running.
    """
    waiting = [job for job in queue.jobs if job.state != "RUNNING"]
    # "Dependency" only means that a job waits for another job of the run, so any other reason explains more.
    next_job = next((job for job in waiting if job.reason != "Dependency"), waiting[0])
    meaning = _MEANING_OF_REASON.get(next_job.reason)
    reason = f"{next_job.reason}: {meaning}" if meaning else next_job.reason
    begun = links(since_submission(jobs))
    if begun and begun[-1].end is not None:
        return f"{reason}; the last job: {begun[-1].end.why}"
    return reason


def _why_not_begun(queue: QueueView | None, jobs: Sequence[JobRecord]) -> str:
    """Return the likely reason why the ranks of a run have recorded nothing yet, as one line.

    Call it only for a run without events, without heartbeats and without jobs in the queue. A `queue` of None means
    that there is no Slurm, or that Slurm does not answer.
    """
    submitted = [job for record in jobs if isinstance(record, JobSubmitted) for job in record.jobs]
    if not submitted:
        return "it was never submitted, and no start has written a record"
    begun = links(since_submission(jobs))
    if begun:
        newest = begun[-1]
        verdict = (newest.end.why if newest.end else "") or "it ended without a verdict"
        return f"job {newest.begin.job} began, and no rank has written a record: {verdict}; see its log in slurm/"
    if queue is None:
        return f"jobs {', '.join(submitted)} were submitted, and Slurm does not answer"
    return (
        f"jobs {', '.join(submitted)} are not in the queue any more, and none has begun: see `sacct -j {submitted[0]}`"
    )
