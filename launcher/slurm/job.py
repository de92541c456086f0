"""What a job notes when it begins, and what becomes of the run when it ends. Called by the batch script.

Guarantee: the verdict is a pure function (`decide`) of the ledger, of jobs.jsonl, of the exit code of every node and
of how the job was told to end. `done` is believed only of the ledger: a launcher can end with 0 after a kill.

    done    the target step is reached; the rest of the chain is cancelled
    next    stopped on purpose (75), or without sick nodes (69): the next link, or a requeue
    again   a crash: a link in its place, or a requeue, as long as new checkpoints come
    stop    nothing but a person can help (78, no progress, RUN/stop): the rest of the chain is cancelled
    leave   somebody ended the job (scancel, preemption), or another one has taken over: what follows is Slurm's

jobs.jsonl, beside the scripts in RUN/slurm/, holds one line for each submission, begin and end of a job; the only
writer is the one job of the run that Slurm lets run (`--dependency=singleton`).
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
from electra_dist.run.strikes import excluded_nodes, read_strikes

_CANCELLED_BEFORE_S = 30.0  # a TERM earlier than this before the limit is not the limit's

Action = Literal["done", "next", "again", "stop", "leave"]


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """What the batch script does next."""

    action: Action
    exit_code: int
    why: str
    sick_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended, as its batch script saw it."""

    job: str
    restart: int
    codes: Mapping[str, int]  # exit code by node; a node that died has none
    cancelled: bool = False  # TERM long before the time limit
    max_fruitless_restarts: int = 3  # in a row without a new checkpoint, of jobs or of the ranks within them


def decide(ledger: Sequence[Record], jobs: Sequence[Record], end: JobEnd) -> JobVerdict:
    """The verdict on the job that has ended."""
    began = next(record for record in reversed(jobs) if record["event"] == "begin")
    if (began["job"], began["restart"]) != (end.job, end.restart):  # this node was cut off and given up meanwhile
        return JobVerdict(action="leave", exit_code=EXIT_CRASH, why=f"job {began['job']} has taken the run over")
    events = ledger[began["ledger_events"] :]  # counted, not timed: clocks differ
    if any(record["event"] == "done" for record in ledger):
        return JobVerdict(action="done", exit_code=EXIT_DONE, why="the target step is reached")
    if EXIT_USER_ERROR in end.codes.values():
        return JobVerdict(action="stop", exit_code=EXIT_USER_ERROR, why="a mistake that only a person can mend (78)")
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
        why = f"{', '.join(sick)} unhealthy; going on without"
        return JobVerdict(action="next", exit_code=EXIT_UNHEALTHY, why=why, sick_nodes=sick)
    return _after_crash(ledger, jobs, end)


def _after_crash(ledger: Sequence[Record], jobs: Sequence[Record], end: JobEnd) -> JobVerdict:
    what = ", ".join(f"{node} {code}" for node, code in sorted(end.codes.items())) or "no node told its exit code"
    failed = max(jobs_without_progress(ledger, jobs), starts_without_progress(ledger, jobs))
    if failed > end.max_fruitless_restarts:
        why = f"{failed} starts in a row ended without a new checkpoint ({what}); see the log, then submit again"
        return JobVerdict(action="stop", exit_code=EXIT_CRASH, why=why)
    why = f"crash ({what}); {end.max_fruitless_restarts + 1 - failed} more without a new checkpoint end the run"
    return JobVerdict(action="again", exit_code=EXIT_CRASH, why=why)


def jobs_without_progress(ledger: Sequence[Record], jobs: Sequence[Record]) -> int:
    """Jobs in a row, up to the newest, that began where the newest checkpoint is and did not stop on purpose."""
    reached, count = newest_checkpoint(ledger), 0
    on_purpose = {(r["job"], r["restart"]) for r in jobs if r["event"] == "end" and r["verdict"] != "again"}
    for record in reversed(jobs):
        if record["event"] == "submit" or (record["event"] == "begin" and record["checkpoint_step"] != reached):
            break  # a person has looked at it, or it has moved since
        if record["event"] == "begin" and (record["job"], record["restart"]) not in on_purpose:
            count += 1
    return count


def starts_without_progress(ledger: Sequence[Record], jobs: Sequence[Record]) -> int:
    """The same for starts of the ranks: a supervisor starts them several times within a job."""
    submitted = max((n for n, record in enumerate(jobs) if record["event"] == "submit"), default=-1)
    since = next((r["ledger_events"] for r in jobs[submitted + 1 :] if r["event"] == "begin"), 0)
    reached, count = newest_checkpoint(ledger), 0
    moved = next((n + 1 for n, e in enumerate(ledger) if e["event"] == "checkpoint" and e["step"] == reached), 0)
    for event in ledger[max(since, moved) :]:
        count += event["event"] in ("start", "resume")
        count -= event["event"] in ("stop", "rollback") and count > 0
    return count


def note(run_dir: Path, event: str, **details: Any) -> None:
    """Append a line to RUN/slurm/jobs.jsonl."""
    file = JsonlFile(run_dir / JOBS_FILE)
    file.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details})
    file.close()


def exit_codes(state: Path) -> dict[str, int]:
    """The exit code that each node's task left behind."""
    files = {file.name.removeprefix("exit-"): file.read_text().strip() for file in state.glob("exit-*")}
    return {node: int(text) for node, text in files.items() if text.isdigit()}


def begin(args: argparse.Namespace) -> None:
    """Note that a job begins."""
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
    """Decide, note it, and print `action|exit code|nodes to leave out|why` for the batch script."""
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
    """`python -m launcher.slurm.job begin|end RUN ...`."""
    parser = argparse.ArgumentParser(prog="launcher.slurm.job", description="The batch script's bookkeeping.")
    commands = parser.add_subparsers(required=True)
    for command, names in ((begin, ("nodes", "submitted", "started")), (end, ("told", "end-time"))):
        sub = commands.add_parser(command.__name__)
        sub.set_defaults(command=command)
        sub.add_argument("run", type=Path)
        sub.add_argument("--job", required=True)
        sub.add_argument("--restart", type=int, default=0)
        for name in names:
            sub.add_argument(f"--{name}", default="")
        if command is end:
            sub.add_argument("--state", type=Path, required=True)
            sub.add_argument("--config", required=True)
    args = parser.parse_args(argv)
    args.command(args)
    return EXIT_DONE


def _iso(seconds: str) -> str | None:
    """UTC, as in the ledger; None where Slurm did not say."""
    if not re.fullmatch(r"\d+", seconds):
        return None
    return datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main())
