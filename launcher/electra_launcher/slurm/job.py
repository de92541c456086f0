"""Record the begin and the end of a Slurm job, and decide how the run goes on after it. Called by job.sh.

Guarantee: the verdict is a pure function (`decide`) of the ledger (the run's list of events), of jobs.jsonl, of the
exit code of every node, of whether the job was cancelled, and of `cluster.max_fruitless_restarts`. Whether a run is
done is read only from the ledger. The verdicts, with the exit codes that lead to them, are:

    done    the target step is reached; all waiting jobs of the run are cancelled
    next    stopped on purpose (75), or a node is unhealthy (69); the next job of the chain or a requeue continues
    later   storage stayed full or away (75); a replacement job or a requeue continues in ten minutes
    again   crashed, and not too often without a new checkpoint; a replacement job or a requeue continues
    stop    a person must act (78, no new checkpoint, RUN/stop); all waiting jobs of the run are cancelled
    leave   ended from outside (scancel, preemption), or a newer job has taken the run over; no job is started, and
            after TERM a job that is not of a chain cancels its standby job

How: RUN/slurm/jobs.jsonl holds one line for each submission, and two lines, "begin" and "end", for each start of the
ranks by a job. A job starts the ranks again when Slurm requeues it, and when a spare node replaces another node. Each
start has a name, its session: job-ID-RESTART, or job-ID-RESTART-REPLACEMENTS. Two jobs of a run never write at the
same time, because Slurm runs one at a time (`--dependency=singleton`).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from electra_dist.config import Config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR, UserError
from electra_dist.escapes import printable
from electra_dist.run.failures import Failure, excluded_nodes, newest_failure, read_failures, read_strikes
from electra_dist.run.folder import CONFIG_FILE, JOBS_FILE, SLURM_DIR, is_run_folder
from electra_dist.run.history import events_at_newest_checkpoint, links, newest_checkpoint, since_submission, starts
from electra_dist.run.ledger import JobRecord, LedgerEvent, append_job, read_jobs, read_ledger
from electra_dist.store.atomic_files import read_regular
from electra_dist.store.patience import Patience, patient
from electra_launcher.entry import begin_program, exit_code_of, read_config

_CANCELLED_BEFORE_S = 30.0  # A TERM that comes earlier than this before the time limit is a cancellation.

Action = Literal["done", "next", "later", "again", "stop", "leave"]


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """Decision after a Slurm job has ended: what its batch script does next, the script's exit code, and why."""

    action: Action
    exit_code: int  # of the batch script
    why: str  # one line without "|", for the log, jobs.jsonl and `electra-dist status`
    sick_nodes: tuple[str, ...] = ()  # nodes to exclude because they ended with EXIT_UNHEALTHY


def exit_codes(folder: Path) -> dict[str, int]:
    """Return the exit code of each node's supervisor by the node's name, from the files `exit-NODE` of one start.

    The result lacks a node that died: it has no file, or a file without a number.
    """
    codes = {}
    for file in folder.glob("exit-*"):
        if not file.is_file():
            continue
        text = read_regular(file).strip()
        if re.fullmatch(rb"\d{1,3}", text):
            node = file.name.removeprefix("exit-")
            codes[node] = int(text)
    return codes


@patient
def begin(args: argparse.Namespace, config: Config, *, patience: Patience) -> None:
    """Record in jobs.jsonl that a Slurm job begins, and how far the run is at this moment.

    The record has the number of ledger events so far, from which `decide` later knows which events are of this job.
    It also has the step of the newest checkpoint, which later shows whether the job has saved another checkpoint.
    """
    ledger = read_ledger(args.run)
    _check_same_run(args.run, args.config, config, ledger)
    append_job(
        args.run,
        "begin",
        **_parse_session(args.session),
        nodes=args.nodes,
        submitted=_iso(args.submitted),
        started=_iso(args.started),
        ledger_events=len(ledger),
        checkpoint_step=newest_checkpoint(ledger),
        uptime_s=round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
    )


def _parse_session(session: str) -> dict[str, str | int]:
    """Split a session, such as job-4711-0, into fields of its record in jobs.jsonl: job, restart and replacements."""
    match = re.fullmatch(r"job-(\d+)-(\d+)(?:-(\d+))?", session)
    if match is None:
        raise UserError(f"--session {session}: no name of a start of a job; give one such as job-4711-0")
    job, restart, replacements = match.groups("0")
    return {"job": job, "restart": int(restart), "replacements": int(replacements)}


def _check_same_run(run_dir: Path, config_file: str, config: Config, ledger: Sequence[LedgerEvent]) -> None:
    """Raise a UserError if a job would begin a new run: its config has another run folder, or files were deleted."""
    config_run_dir = Path(config.run_dir).absolute()
    if config_run_dir != run_dir.absolute():
        raise UserError(
            f"{config_file}: run_dir is {config_run_dir}, and this job belongs to the run in {run_dir}; submit "
            f"the run again from the folder in which it was submitted first, or with an absolute run_dir"
        )
    has_saved = any(record.checkpoint_step > 0 for record in read_jobs(run_dir) if record.event != "submit")
    if has_saved and not ledger and not is_run_folder(run_dir):
        raise UserError(
            f"{run_dir}: an earlier job has saved checkpoints of a run, and the folder has no {CONFIG_FILE} any more; "
            f"restore the run folder, or delete {run_dir / JOBS_FILE} to begin a new run"
        )


@patient
def end(args: argparse.Namespace, config: Config, *, patience: Patience) -> None:
    """Decide how the run goes on after the end of a Slurm job, record it in jobs.jsonl, and print it for the script.

    The printed line is `action|exit code|nodes to exclude|why`. The nodes, separated by commas, are those with a
    strike (a recorded fault) that has not expired, and those that ended this job as unhealthy.
    """
    jobs = read_jobs(args.run)
    now = _current_time(jobs, args.session)  # first, because it depends on the current time
    ledger = read_ledger(args.run)
    codes = exit_codes(args.run / SLURM_DIR / args.session)
    verdict = decide(
        ledger,
        jobs,
        args.session,
        codes,
        cancelled=_is_cancelled(args.told, args.end_time, now),
        max_fruitless_restarts=config.cluster.max_fruitless_restarts,
        failure=newest_failure(
            [one for one in read_failures(args.run) if one.start.startswith(f"{args.session}-start-")]
        ),
    )
    expires_s = 3600 * config.cluster.strike_expires_h
    struck_nodes = excluded_nodes(read_strikes(args.run), time.time(), expires_s=expires_s)
    excluded = sorted({*struck_nodes, *verdict.sick_nodes})
    append_job(
        args.run,
        "end",
        **_parse_session(args.session),
        codes=codes,
        ledger_events=len(ledger),
        checkpoint_step=newest_checkpoint(ledger),
        verdict=verdict.action,
        why=verdict.why,
    )
    print(printable(f"{verdict.action}|{verdict.exit_code}|{','.join(excluded)}|{verdict.why}"))


def _current_time(jobs: Sequence[JobRecord], session: str) -> float:
    """Return the current Unix time, which a change of the system clock during the job does not affect.

    It is the recorded time of the job's begin plus the seconds since then by the boot clock. Without such a record it
    is the time of the system clock.
    """
    for link in reversed(links(jobs)):
        if link.session == session and link.begin.uptime_s is not None:
            # A job begins and ends on the same node, so both readings are of one boot clock.
            elapsed_s = time.clock_gettime(time.CLOCK_BOOTTIME) - link.begin.uptime_s
            return link.begin.unix_s + elapsed_s
    return time.time()


def _is_cancelled(received_signal: str, end_time: str, now: float) -> bool:
    """Return whether scancel or a preemption ended the job: its script got TERM over 30 s before the time limit.

    `end_time` is the time limit's end and `now` the current time, both Unix time; a job without a limit has none.
    """
    has_limit = re.fullmatch(r"\d+", end_time) is not None
    limit = float(end_time) if has_limit else float("inf")
    # Slurm sends TERM at the time limit, too. A job that received USR1 was not cancelled.
    return received_signal == "TERM" and now < limit - _CANCELLED_BEFORE_S


def decide(
    ledger: Sequence[LedgerEvent],
    jobs: Sequence[JobRecord],
    session: str,
    codes: Mapping[str, int],
    *,
    cancelled: bool,
    max_fruitless_restarts: int,
    failure: Failure | None = None,
) -> JobVerdict:
    """Decide how a run continues after one of its Slurm jobs has ended. Nothing is read or written.

    The first of these cases that holds decides: a newer job has begun, the run is done, a user error, a stop that a
    person asked for by the file RUN/stop, a cancelled job, a stop on purpose, storage that stayed full or away, an
    unhealthy node, a crash. `codes` lacks nodes that died. `cancelled` says that TERM came over 30 s before the time
    limit. `failure` is what its supervisors have found out about its newest failed start. Raises UserError if `jobs`
    has no record that this job began.
    """
    job_links = links(jobs)
    if session not in [link.session for link in job_links]:
        raise UserError(f"{JOBS_FILE}: the begin of {session} is missing; restore the file, or submit the run again")
    newest = job_links[-1]
    if newest.session != session:  # This job's node was cut off.
        why = f"newer job {newest.begin.job} has taken the run over"
        return JobVerdict(action="leave", exit_code=EXIT_CRASH, why=why)
    if any(event.event == "done" for event in ledger):
        return JobVerdict(action="done", exit_code=EXIT_DONE, why="the target step is reached")
    if EXIT_USER_ERROR in codes.values():
        why = "user error (78): fix what the `error:` line in the job's log names, then submit again"
        if failure is not None and failure.repeated:
            why = f"{failure.description}; {failure.kind.next_step}, then submit again"
        return JobVerdict(action="stop", exit_code=EXIT_USER_ERROR, why=why)
    # The events of this job are selected by count and not by time, because the clocks of nodes differ.
    events = ledger[newest.begin.ledger_events :]
    stops = [event for event in events if event.event == "stop"]
    stop = stops[-1] if stops else None
    if stop is not None and stop.why.startswith("file"):  # for example "file /runs/a/stop"
        why = f"stopped at step {stop.step:,} by {stop.why}; submit again to go on"
        return JobVerdict(action="stop", exit_code=EXIT_STOPPED, why=why)
    if cancelled:
        exit_code = EXIT_CRASH if stop is None else EXIT_STOPPED
        return JobVerdict(action="leave", exit_code=exit_code, why="the job was cancelled")
    if stop is not None:
        return JobVerdict(action="next", exit_code=EXIT_STOPPED, why=f"stopped on purpose at step {stop.step:,}")
    lost = [event for event in events if event.event == "storage"]
    if lost:
        why = f"storage stayed full or away at step {lost[-1].step:,}; the run goes on in 10 minutes"
        return JobVerdict(action="later", exit_code=EXIT_STOPPED, why=why)
    sick_nodes = tuple(sorted(node for node, code in codes.items() if code == EXIT_UNHEALTHY))
    if sick_nodes:
        why = f"{', '.join(sick_nodes)} unhealthy; the run continues on other nodes"
        return JobVerdict(action="next", exit_code=EXIT_UNHEALTHY, why=why, sick_nodes=sick_nodes)
    return _after_crash(ledger, jobs, codes, max_fruitless_restarts, failure)


def _after_crash(
    ledger: Sequence[LedgerEvent],
    jobs: Sequence[JobRecord],
    codes: Mapping[str, int],
    max_fruitless_restarts: int,
    failure: Failure | None,
) -> JobVerdict:
    """Return the verdict after a crash: `again`, or `stop` if too many starts in a row saved no new checkpoint."""
    shown_codes = ", ".join(f"{node} {code}" for node, code in sorted(codes.items()))
    if not shown_codes:
        shown_codes = "no node reported an exit code"
    if failure is not None:
        shown_codes += f"; {failure.description}"
    # A job can die before it starts its ranks, and can start them several times: the larger count decides.
    num_fruitless = max(jobs_without_progress(ledger, jobs), starts_without_progress(ledger, jobs))
    if num_fruitless > max_fruitless_restarts:
        why = (
            f"{num_fruitless} starts in a row ended without a new checkpoint ({shown_codes}); see the log, then "
            "submit again"
        )
        return JobVerdict(action="stop", exit_code=EXIT_CRASH, why=why)
    num_left = max_fruitless_restarts + 1 - num_fruitless  # + 1: the first start is no restart
    why = f"crash ({shown_codes}), starting again; the run stops after {num_left} more starts without a new checkpoint"
    return JobVerdict(action="again", exit_code=EXIT_CRASH, why=why)


def jobs_without_progress(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord]) -> int:
    """Return how many Slurm jobs in a row, up to the newest one, crashed without a new checkpoint.

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
    """Return how often the ranks were started since the last new checkpoint was saved.

    One Slurm job may start the ranks several times. Only starts in jobs since a person's last submission count. Starts
    that ended with a stop, with storage that stayed full or away, or with a rollback (a return to an older checkpoint)
    do not count.
    """
    first_counted = events_at_newest_checkpoint(ledger)  # index in the ledger
    submitted = links(since_submission(jobs))
    if submitted:
        first_counted = max(first_counted, submitted[0].begin.ledger_events)
    return sum(
        start.index >= first_counted and start.ended_by not in ("stop", "storage", "rollback")
        for start in starts(ledger)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m electra_launcher.slurm.job begin|end RUN ...` as the batch script does, and return its exit code.

    The code is 0; 75 if the run folder stayed full or away for longer than `cluster.storage_patience_s`; 78 if the
    run's files or its config cannot be used. The reason is one line on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="electra_launcher.slurm.job", description="Bookkeeping of a Slurm job; called by the batch script."
    )
    commands = parser.add_subparsers(required=True)
    begin_parser = commands.add_parser("begin", help="record that a job begins")
    begin_parser.set_defaults(command=begin)
    begin_parser.add_argument("--nodes", default="", help="nodes of the job, separated by commas")
    begin_parser.add_argument("--submitted", default="", help="when the job was queued, Unix seconds")
    begin_parser.add_argument("--started", default="", help="when the job started, Unix seconds")
    end_parser = commands.add_parser("end", help="decide what follows the end of a job, and print it")
    end_parser.set_defaults(command=end)
    end_parser.add_argument("--told", default="", help="the signal that the batch script received, USR1 or TERM")
    end_parser.add_argument("--end-time", default="", help="when the time limit ends the job, Unix seconds")
    for command in (begin_parser, end_parser):
        command.add_argument("run", type=Path, help="the run folder")
        command.add_argument("--session", required=True, help="job-ID-RESTART or job-ID-RESTART-REPLACEMENTS")
        command.add_argument("--config", required=True, help="the resolved config of the run")
    args = parser.parse_args(argv)

    def program() -> int:
        config, patience = read_config(args.config)
        args.command(args, config, patience=patience)
        return EXIT_DONE

    return exit_code_of(program)


def _iso(seconds: str) -> str | None:
    """Convert Unix seconds to ISO 8601 in UTC, as used in the ledger; return None if `seconds` is no number."""
    if not re.fullmatch(r"\d+", seconds):
        return None
    return datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    begin_program()
    sys.exit(main())
