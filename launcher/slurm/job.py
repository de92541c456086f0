"""Record the begin and end of a Slurm job, and decide what follows its end. Called by the batch script.

Guarantee: the verdict is a pure function (`decide`) of the ledger, of jobs.jsonl, of the exit code of every node and
of whether the job was cancelled. Only the ledger shows that a run is done: a launcher can end with 0 after a kill.

    done    the target step is reached; the rest of the chain is cancelled
    next    stopped on purpose (75), or a node is unhealthy (69); the next job of the chain or a requeue continues
    again   crashed, while new checkpoints appear; a replacement job or a requeue continues
    stop    a person must act (78, no new checkpoint, RUN/stop); the rest of the chain is cancelled
    leave   ended from outside (scancel, preemption), or a newer job has taken the run over; nothing is done

The numbers are exit codes. A chain is several jobs that are submitted together and run one after another; without a
chain, a single job is requeued.

How: RUN/slurm/jobs.jsonl holds one line for each submission, begin and end of a job. Only one job of a run writes to
it at a time, because Slurm runs one at a time (`--dependency=singleton`).
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
from typing import Any, Literal

from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR
from electra_dist.run.folder import JOBS_FILE
from electra_dist.run.jsonl import JsonlFile, Record
from electra_dist.run.ledger import newest_checkpoint, read_jobs, read_ledger
from electra_dist.run.node_strikes import excluded_nodes, read_strikes

_CANCELLED_BEFORE_S = 30.0  # A TERM that comes earlier than this before the time limit is a cancellation.

Action = Literal["done", "next", "again", "stop", "leave"]


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """Decision on a Slurm job that has ended: what its batch script does next, and why."""

    action: Action
    exit_code: int  # of the batch script
    why: str  # one line without "|", for the log, jobs.jsonl and `electra-dist status`
    sick_nodes: tuple[str, ...] = ()  # nodes to exclude because they ended with EXIT_UNHEALTHY


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a Slurm job ended, as its batch script saw it; `decide` needs this beside the ledger and jobs.jsonl."""

    job: str  # Slurm's job id
    restart: int  # how often Slurm has requeued the job
    codes: Mapping[str, int]  # node -> exit code of its supervisor; a node that died has none
    cancelled: bool = False  # whether TERM came long before the time limit
    max_fruitless_restarts: int = 3  # allowed in a row without a new checkpoint; jobs and starts within jobs count


def decide(ledger: Sequence[Record], jobs: Sequence[Record], end: JobEnd) -> JobVerdict:
    """Decide how a run continues after one of its Slurm jobs has ended. Pure.

    Args:
        ledger: all events of the run.
        jobs: all lines of jobs.jsonl; the begin of this job must be among them.
        end: how this job ended.

    Returns:
        The action of the batch script, its exit code and the reason.
    """
    began = next(record for record in reversed(jobs) if record["event"] == "begin")
    if (began["job"], began["restart"]) != (end.job, end.restart):  # This node was cut off, and a newer job began.
        return JobVerdict(action="leave", exit_code=EXIT_CRASH, why=f"newer job {began['job']} has taken the run over")
    events = ledger[began["ledger_events"] :]  # selected by count and not by time, because clocks differ
    if any(record["event"] == "done" for record in ledger):
        return JobVerdict(action="done", exit_code=EXIT_DONE, why="the target step is reached")
    if EXIT_USER_ERROR in end.codes.values():
        why = "user error (78): fix what the `error:` line in the job's log names, then submit again"
        return JobVerdict(action="stop", exit_code=EXIT_USER_ERROR, why=why)
    stop = next((record for record in reversed(events) if record["event"] == "stop"), None)
    if stop is not None and str(stop.get("why", "")).startswith("file"):
        why = f"stopped at step {stop['step']:,} by {stop['why']}; submit again to go on"
        return JobVerdict(action="stop", exit_code=EXIT_STOPPED, why=why)
    if end.cancelled:
        return JobVerdict(action="leave", exit_code=EXIT_STOPPED if stop else EXIT_CRASH, why="the job was cancelled")
    if stop is not None:
        return JobVerdict(action="next", exit_code=EXIT_STOPPED, why=f"stopped on purpose at step {stop['step']:,}")
    sick = tuple(sorted(node for node, code in end.codes.items() if code == EXIT_UNHEALTHY))
    if sick:
        why = f"{', '.join(sick)} unhealthy; the run continues on other nodes"
        return JobVerdict(action="next", exit_code=EXIT_UNHEALTHY, why=why, sick_nodes=sick)
    return _after_crash(ledger, jobs, end)


def _after_crash(ledger: Sequence[Record], jobs: Sequence[Record], end: JobEnd) -> JobVerdict:
    """Return the verdict after a crash: `again`, or `stop` if too many starts in a row saved no new checkpoint."""
    codes = ", ".join(f"{node} {code}" for node, code in sorted(end.codes.items())) or "no node reported an exit code"
    num_fruitless = max(jobs_without_progress(ledger, jobs), starts_without_progress(ledger, jobs))
    if num_fruitless > end.max_fruitless_restarts:
        why = (
            f"{num_fruitless} starts in a row ended without a new checkpoint ({codes}); see the log, then submit again"
        )
        return JobVerdict(action="stop", exit_code=EXIT_CRASH, why=why)
    num_left = end.max_fruitless_restarts + 1 - num_fruitless
    why = f"crash ({codes}), starting again; after {num_left} more without a new checkpoint the run stops"
    return JobVerdict(action="again", exit_code=EXIT_CRASH, why=why)


def jobs_without_progress(ledger: Sequence[Record], jobs: Sequence[Record]) -> int:
    """Return how many of the newest Slurm jobs in a row saved no new checkpoint and did not stop on purpose.

    A job that died without recording its end counts, too. A submission by a person resets the count. Pure.
    """
    reached_step = newest_checkpoint(ledger)
    ends = [record for record in jobs if record["event"] == "end"]
    stopped_on_purpose = {(record["job"], record["restart"]) for record in ends if record["verdict"] != "again"}
    count = 0
    for record in reversed(jobs):
        if record["event"] == "submit":
            break
        if record["event"] == "begin":
            if record["checkpoint_step"] != reached_step:
                break  # A checkpoint was saved since this job began.
            if (record["job"], record["restart"]) not in stopped_on_purpose:
                count += 1
    return count


def starts_without_progress(ledger: Sequence[Record], jobs: Sequence[Record]) -> int:
    """Return how many of the newest starts of the ranks in a row saved no new checkpoint.

    A Slurm job may start the ranks several times. The starts since the newest checkpoint was first saved, and since
    the last submission by a person, are counted, except those that ended with a stop or a rollback. Pure.
    """
    last_submit = max((index for index, record in enumerate(jobs) if record["event"] == "submit"), default=-1)
    begins = [record for record in jobs[last_submit + 1 :] if record["event"] == "begin"]
    submitted_at = begins[0]["ledger_events"] if begins else 0
    reached_step = newest_checkpoint(ledger)
    reached_at = 0
    for index, event in enumerate(ledger):
        if event["event"] == "checkpoint" and event["step"] == reached_step:
            reached_at = index + 1
            break
    count = 0
    for event in ledger[max(submitted_at, reached_at) :]:
        if event["event"] in ("start", "resume"):
            count += 1
        elif event["event"] in ("stop", "rollback") and count > 0:
            count -= 1
    return count


def note(run_dir: Path, event: str, **details: Any) -> None:
    """Append a line to RUN/slurm/jobs.jsonl, with the time in UTC.

    Args:
        run_dir: the run folder.
        event: "submit", "begin" or "end".
        **details: further fields, of types that JSON knows.
    """
    file = JsonlFile(run_dir / JOBS_FILE)
    file.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details})
    file.close()


def exit_codes(state: Path) -> dict[str, int]:
    """Return a dict from node to exit code, read from the files `exit-NODE` of a job's state folder.

    A node that died has no file, or one that is not a number; it is left out.
    """
    texts = {file.name.removeprefix("exit-"): file.read_text().strip() for file in state.glob("exit-*")}
    return {node: int(text) for node, text in texts.items() if text.isdigit()}


def begin(args: argparse.Namespace) -> None:
    """Record the begin of a Slurm job in jobs.jsonl: its nodes, its times and the newest checkpoint of the run.

    Args:
        args: options of the command line, see `main`.
    """
    ledger = read_ledger(args.run)
    note(
        args.run,
        "begin",
        job=args.job,
        restart=args.restart,
        nodes=args.nodes,
        submitted=_iso(args.submitted),
        started=_iso(args.started),
        ledger_events=len(ledger),
        checkpoint_step=newest_checkpoint(ledger),
    )


def end(args: argparse.Namespace) -> None:
    """Decide what follows the end of a Slurm job, record it in jobs.jsonl, and print it for the batch script.

    The printed line is `action|exit code|nodes to exclude|why`. The nodes, separated by commas, are those with a
    strike (a recorded fault) that has not expired, and those that were found unhealthy in this job.

    Args:
        args: options of the command line, see `main`.
    """
    limit = float(args.end_time) if re.fullmatch(r"\d+", args.end_time) else float("inf")
    cancelled = args.told == "TERM" and time.time() < limit - _CANCELLED_BEFORE_S
    codes = exit_codes(args.state)
    cluster = load_config(args.config).cluster
    ended = JobEnd(
        job=args.job,
        restart=args.restart,
        codes=codes,
        cancelled=cancelled,
        max_fruitless_restarts=cluster.max_fruitless_restarts,
    )
    verdict = decide(read_ledger(args.run), read_jobs(args.run), ended)
    struck = excluded_nodes(read_strikes(args.run), time.time(), expires_s=3600 * cluster.strike_expires_h)
    excluded = sorted({*struck, *verdict.sick_nodes})
    note(args.run, "end", job=args.job, restart=args.restart, codes=codes, verdict=verdict.action, why=verdict.why)
    print(f"{verdict.action}|{verdict.exit_code}|{','.join(excluded)}|{verdict.why}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m launcher.slurm.job begin|end RUN ...`, as the batch script calls it, and return 0.

    Args:
        argv: command-line arguments; None means those of this process.

    Raises:
        UserError: the run's files or its config cannot be read or written.
    """
    parser = argparse.ArgumentParser(
        prog="launcher.slurm.job", description="Bookkeeping of a Slurm job; called by the batch script."
    )
    commands = parser.add_subparsers(required=True)
    begin_parser = commands.add_parser("begin", help="record that a job begins")
    end_parser = commands.add_parser("end", help="decide what follows the end of a job, and print it")
    for command_parser, command in ((begin_parser, begin), (end_parser, end)):
        command_parser.set_defaults(command=command)
        command_parser.add_argument("run", type=Path, help="the run folder")
        command_parser.add_argument("--job", required=True, help="Slurm's job id")
        command_parser.add_argument("--restart", type=int, default=0, help="how often Slurm has requeued the job")
    begin_parser.add_argument("--nodes", default="", help="nodes of the job, separated by commas")
    begin_parser.add_argument("--submitted", default="", help="when the job was queued, Unix seconds")
    begin_parser.add_argument("--started", default="", help="when the job started, Unix seconds")
    end_parser.add_argument("--told", default="", help="the signal that the batch script received, USR1 or TERM")
    end_parser.add_argument("--end-time", default="", help="when the time limit ends the job, Unix seconds")
    end_parser.add_argument("--state", type=Path, required=True, help="folder with the nodes' exit codes")
    end_parser.add_argument("--config", required=True, help="the resolved config of the run")
    args = parser.parse_args(argv)
    args.command(args)
    return EXIT_DONE


def _iso(seconds: str) -> str | None:
    """Convert Unix seconds to ISO 8601 in UTC, the format of the ledger; None for a text that is not a number."""
    if not re.fullmatch(r"\d+", seconds):
        return None
    return datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main())
