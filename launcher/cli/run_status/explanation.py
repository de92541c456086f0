"""Explain the state of a run, and suggest the commands to run next."""

from __future__ import annotations

import shlex

from electra_dist.run.folder import CONFIG_FILE, LOG_FILE, SLURM_DIR, STOP_FILE
from electra_dist.run.jsonl import Record
from electra_dist.run.number_formats import format_duration
from launcher.cli.run_status.snapshot import RunSnapshot
from launcher.slurm.job_history import why_not_begun, why_waiting


def reason_of_state(snapshot: RunSnapshot) -> str:
    """Return why the run is in its state, such as "stop: SIGTERM, 50s ago"; "" for a living or finished run."""
    state = snapshot.state
    if state in ("stopped", "dead"):
        # The verdict on the last job explains more than the last event, unless the run was continued without Slurm.
        newest_job = snapshot.jobs[-1] if snapshot.jobs else {}
        later_events = snapshot.ledger[newest_job.get("ledger_events", len(snapshot.ledger)) :]
        was_continued = any(event["event"] in ("start", "resume") for event in later_events)
        if newest_job.get("why") and not was_continued:
            return str(newest_job["why"])
        if snapshot.ledger:
            return _describe_event(snapshot, snapshot.ledger[-1])
    if state in ("held", "waiting") and snapshot.queue:
        return why_waiting(snapshot.queue, snapshot.jobs)
    if state == "not begun":
        return why_not_begun(snapshot.queue, snapshot.jobs)
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


def _describe_event(snapshot: RunSnapshot, event: Record) -> str:
    """Return the name, reason and age of a ledger event as text, for example "stop: SIGTERM, 50s ago"."""
    age = format_duration(snapshot.age_s(event))
    if event.get("why"):
        return f"{event['event']}: {event['why']}, {age} ago"
    return f"{event['event']}, {age} ago"
