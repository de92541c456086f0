"""Decide how a run goes on after one of its Slurm jobs has ended, from what the job and the run have recorded.

Guarantee: the verdict is a pure function (`decide`) of the ledger (the run's list of events), of jobs.jsonl, of the
exit code of every node, of whether the job was cancelled, and of `cluster.max_fruitless_restarts`. Whether a run is
done is read only from the ledger, because a launcher can end with 0 after a kill. The verdicts are:

    done    the target step is reached; all waiting jobs of the run are cancelled
    next    stopped on purpose (75), or a node is unhealthy (69); the next job of the chain or a requeue continues
    later   storage stayed full or away (75); a replacement job or a requeue continues in ten minutes
    again   crashed, and not too often without a new checkpoint; a replacement job or a requeue continues
    stop    a person must act (78, no new checkpoint, RUN/stop); all waiting jobs of the run are cancelled
    leave   ended from outside (scancel, preemption), or a newer job has taken the run over; no job is started, and
            after TERM a job that is not of a chain cancels its standby job

The numbers are exit codes. Without a chain, a single job is requeued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR, UserError
from electra_dist.run.folder import JOBS_FILE
from electra_dist.run.history import (
    events_at_newest_checkpoint,
    links,
    newest_checkpoint,
    since_submission,
    starts,
)
from electra_dist.run.ledger import JobRecord, LedgerEvent

Action = Literal["done", "next", "later", "again", "stop", "leave"]


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """Decision after a Slurm job has ended: what its batch script does next, the script's exit code, and why."""

    action: Action
    exit_code: int  # of the batch script
    why: str  # one line without "|", for the log, jobs.jsonl and `electra-dist status`
    sick_nodes: tuple[str, ...] = ()  # nodes to exclude because they ended with EXIT_UNHEALTHY


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """Which Slurm job has ended, how it ended, and how many restarts without a new checkpoint are allowed."""

    job: str  # Slurm's job id
    restart: int  # how often Slurm has requeued the job
    replacements: int = 0  # how often spare nodes have replaced other nodes since the last requeue
    codes: Mapping[str, int]  # node -> exit code of its supervisor; a node that died has none
    cancelled: bool = False  # whether the job received TERM over 30 s before its time limit
    max_fruitless_restarts: int = 3  # restarts in a row, of jobs or of ranks, that may end without a new checkpoint


def decide(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord], end: JobEnd) -> JobVerdict:
    """Decide how a run continues after one of its Slurm jobs has ended. Pure.

    The first of these cases that holds decides: a newer job has begun, the run is done, a user error, a stop that a
    person asked for by the file RUN/stop, a cancelled job, a stop on purpose, storage that stayed full or away, an
    unhealthy node, a crash. `ledger` and `jobs` hold all lines of the run's ledger and of jobs.jsonl, oldest first. A
    UserError means that `jobs` has no record that this job began.
    """
    job_links = links(jobs)
    identity = (end.job, end.restart, end.replacements)
    if identity not in [link.identity for link in job_links]:
        raise UserError(
            f"{JOBS_FILE}: the begin of job {end.job} is missing; restore the file, or submit the run again"
        )
    newest = job_links[-1]
    if newest.identity != identity:  # This job's node was cut off.
        why = f"newer job {newest.begin.job} has taken the run over"
        return JobVerdict(action="leave", exit_code=EXIT_CRASH, why=why)
    if any(event.event == "done" for event in ledger):
        return JobVerdict(action="done", exit_code=EXIT_DONE, why="the target step is reached")
    if EXIT_USER_ERROR in end.codes.values():
        why = "user error (78): fix what the `error:` line in the job's log names, then submit again"
        return JobVerdict(action="stop", exit_code=EXIT_USER_ERROR, why=why)
    # The events of this job are selected by count and not by time, because the clocks of nodes differ.
    events = ledger[newest.begin.ledger_events :]
    stops = [event for event in events if event.event == "stop"]
    stop = stops[-1] if stops else None
    if stop is not None and stop.why.startswith("file"):  # for example "file /runs/a/stop"
        why = f"stopped at step {stop.step:,} by {stop.why}; submit again to go on"
        return JobVerdict(action="stop", exit_code=EXIT_STOPPED, why=why)
    if end.cancelled:
        exit_code = EXIT_CRASH if stop is None else EXIT_STOPPED
        return JobVerdict(action="leave", exit_code=exit_code, why="the job was cancelled")
    if stop is not None:
        return JobVerdict(action="next", exit_code=EXIT_STOPPED, why=f"stopped on purpose at step {stop.step:,}")
    lost = [event for event in events if event.event == "storage"]
    if lost:
        why = f"storage stayed full or away at step {lost[-1].step:,}; the run goes on in 10 minutes"
        return JobVerdict(action="later", exit_code=EXIT_STOPPED, why=why)
    sick_nodes = tuple(sorted(node for node, code in end.codes.items() if code == EXIT_UNHEALTHY))
    if sick_nodes:
        why = f"{', '.join(sick_nodes)} unhealthy; the run continues on other nodes"
        return JobVerdict(action="next", exit_code=EXIT_UNHEALTHY, why=why, sick_nodes=sick_nodes)
    return _after_crash(ledger, jobs, end)


def _after_crash(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord], end: JobEnd) -> JobVerdict:
    """Return the verdict after a crash: `again`, or `stop` if too many starts in a row saved no new checkpoint."""
    codes = ", ".join(f"{node} {code}" for node, code in sorted(end.codes.items()))
    if not codes:
        codes = "no node reported an exit code"
    # A job can die before it starts its ranks, and can start them several times: the larger count decides.
    num_fruitless = max(jobs_without_progress(ledger, jobs), starts_without_progress(ledger, jobs))
    if num_fruitless > end.max_fruitless_restarts:
        why = (
            f"{num_fruitless} starts in a row ended without a new checkpoint ({codes}); see the log, then submit again"
        )
        return JobVerdict(action="stop", exit_code=EXIT_CRASH, why=why)
    num_left = end.max_fruitless_restarts + 1 - num_fruitless  # + 1: the first start is no restart
    why = f"crash ({codes}), starting again; the run stops after {num_left} more starts without a new checkpoint"
    return JobVerdict(action="again", exit_code=EXIT_CRASH, why=why)


def jobs_without_progress(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord]) -> int:
    """Return how many Slurm jobs in a row, up to the newest one, crashed without a new checkpoint. Pure.

    A job that died without recording its end counts as crashed. Each requeue, and each start with other nodes, counts
    as one more job. A job that ended in another way, for example on purpose, is skipped: it neither counts nor ends
    the row. Only jobs since a person's last submission count.
    """
    reached_step = newest_checkpoint(ledger)
    count = 0
    for link in reversed(links(since_submission(jobs))):
        if link.begin.checkpoint_step != reached_step:
            break  # A checkpoint was saved since this job began.
        if link.end is None or link.end.verdict == "again":
            count += 1
    return count


def starts_without_progress(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord]) -> int:
    """Return how often the ranks were started since a new checkpoint was saved last. Pure.

    One Slurm job may start the ranks several times. Only starts in jobs since a person's last submission count. Starts
    that ended with a stop, with storage that stayed full or away, or with a rollback (a return to an older checkpoint)
    do not count.
    """
    submitted = links(since_submission(jobs))
    first_counted = max(submitted[0].begin.ledger_events if submitted else 0, events_at_newest_checkpoint(ledger))
    return sum(
        start.index >= first_counted and start.ended_by not in ("stop", "storage", "rollback")
        for start in starts(ledger)
    )
