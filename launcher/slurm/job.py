"""Record the begin and the end of a Slurm job, and print how the run goes on after it. Called by the batch script.

`job_verdict.py` decides how the run goes on.

How: RUN/slurm/jobs.jsonl holds one line for each submission, and two lines, "begin" and "end", for each start of the
ranks by a job. A job starts the ranks again when Slurm requeues it, and when a spare node replaces another node. Two
jobs of a run never write at the same time, because Slurm runs one at a time (`--dependency=singleton`).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.config import ClusterConfig
from electra_dist.config.load import load_config
from electra_dist.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR, StorageLost, StoreAway, UserError, error_line
from electra_dist.escapes import printable
from electra_dist.run.folder import CONFIG_FILE, JOBS_FILE, is_run_folder
from electra_dist.run.history import links, newest_checkpoint
from electra_dist.run.ledger import JobRecord, LedgerEvent, append_job, read_jobs, read_ledger
from electra_dist.run.strikes import excluded_nodes, read_strikes
from electra_dist.store.patience import Patience
from electra_dist.store.regular_files import read_regular
from launcher.slurm.job_verdict import JobEnd, decide
from launcher.utf8_mode import start_in_utf8_mode

_CANCELLED_BEFORE_S = 30.0  # A TERM that comes earlier than this before the time limit is a cancellation.


def exit_codes(state: Path) -> dict[str, int]:
    """Return the exit code of each node's supervisor by the node's name, from the files `exit-NODE` in `state`.

    The files are from one start of the ranks. A node that died has no file, or a file without a number, and is missing
    from the result.
    """
    codes = {}
    for file in state.glob("exit-*"):
        if not file.is_file():
            continue
        text = read_regular(file).strip()
        if re.fullmatch(rb"\d{1,3}", text):
            node = file.name.removeprefix("exit-")
            codes[node] = int(text)
    return codes


def begin(args: argparse.Namespace) -> None:
    """Record in jobs.jsonl that a Slurm job begins, and how far the run is at this moment.

    The record has the number of ledger events so far, from which `decide` later knows which events are of this job.
    It also has the step of the newest checkpoint, which later shows whether the job has saved another checkpoint.
    """
    ledger = read_ledger(args.run)
    _check_same_run(args.run, args.config, ledger)
    append_job(
        args.run,
        "begin",
        job=args.job,
        restart=args.restart,
        replacements=args.replacements,
        nodes=args.nodes,
        submitted=_iso(args.submitted),
        started=_iso(args.started),
        ledger_events=len(ledger),
        checkpoint_step=newest_checkpoint(ledger),
        uptime_s=round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
    )


def _check_same_run(run_dir: Path, config_file: str | None, ledger: Sequence[LedgerEvent]) -> None:
    """Raise a UserError if a job would begin a new run: its config has another run folder, or files were deleted."""
    if config_file is not None:
        config_run_dir = Path(load_config(config_file).run_dir).absolute()
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


def end(args: argparse.Namespace) -> None:
    """Decide how the run goes on after the end of a Slurm job, record it in jobs.jsonl, and print it for the script.

    The printed line is `action|exit code|nodes to exclude|why`. The nodes, separated by commas, are those with a
    strike (a recorded fault) that has not expired, and those that ended this job as unhealthy.
    """
    identity = (args.job, args.restart, args.replacements)
    now = _current_time(read_jobs(args.run), identity)  # first, because it depends on the current time
    cancelled = _is_cancelled(args.told, args.end_time, now)
    codes = exit_codes(args.state)
    cluster = load_config(args.config).cluster
    job_end = JobEnd(
        job=args.job,
        restart=args.restart,
        replacements=args.replacements,
        codes=codes,
        cancelled=cancelled,
        max_fruitless_restarts=cluster.max_fruitless_restarts,
    )
    ledger = read_ledger(args.run)
    verdict = decide(ledger, read_jobs(args.run), job_end)
    struck_nodes = excluded_nodes(read_strikes(args.run), time.time(), expires_s=3600 * cluster.strike_expires_h)
    excluded = sorted({*struck_nodes, *verdict.sick_nodes})
    append_job(
        args.run,
        "end",
        job=args.job,
        restart=args.restart,
        replacements=args.replacements,
        codes=codes,
        ledger_events=len(ledger),
        checkpoint_step=newest_checkpoint(ledger),
        verdict=verdict.action,
        why=verdict.why,
    )
    print(printable(f"{verdict.action}|{verdict.exit_code}|{','.join(excluded)}|{verdict.why}"))


def _current_time(jobs: Sequence[JobRecord], identity: tuple[str, int, int]) -> float:
    """Return the current Unix time, which a change of the system clock during the job does not affect.

    It is the recorded time of the job's begin plus the seconds since then by the boot clock. Without such a record it
    is the time of the system clock.
    """
    for link in reversed(links(jobs)):
        if link.identity == identity and link.begin.uptime_s is not None:
            # A job begins and ends on the same node, so both readings are of one boot clock.
            elapsed_s = time.clock_gettime(time.CLOCK_BOOTTIME) - link.begin.uptime_s
            return link.begin.unix_s + elapsed_s
    return time.time()


def _is_cancelled(received_signal: str, end_time: str, now: float) -> bool:
    """Return whether scancel or a preemption ended the job: the script got TERM over 30 s before the time limit."""
    has_limit = re.fullmatch(r"\d+", end_time) is not None
    limit = float(end_time) if has_limit else float("inf")
    # Slurm sends TERM at the time limit, too. A job that received USR1 was not cancelled.
    return received_signal == "TERM" and now < limit - _CANCELLED_BEFORE_S


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m launcher.slurm.job begin|end RUN ...`, as the batch script calls it, and return its exit code.

    The code is 0; 75 if the run folder stayed full or away for longer than `cluster.storage_patience_s`; 78 if the
    run's files or its config cannot be used. The reason is one line on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="launcher.slurm.job", description="Bookkeeping of a Slurm job; called by the batch script."
    )
    commands = parser.add_subparsers(required=True)
    begin_parser = commands.add_parser("begin", help="record that a job begins")
    begin_parser.set_defaults(command=begin)
    _add_job_options(begin_parser)
    begin_parser.add_argument("--config", help="the resolved config of the run")
    begin_parser.add_argument("--nodes", default="", help="nodes of the job, separated by commas")
    begin_parser.add_argument("--submitted", default="", help="when the job was queued, Unix seconds")
    begin_parser.add_argument("--started", default="", help="when the job started, Unix seconds")
    end_parser = commands.add_parser("end", help="decide what follows the end of a job, and print it")
    end_parser.set_defaults(command=end)
    _add_job_options(end_parser)
    end_parser.add_argument("--told", default="", help="the signal that the batch script received, USR1 or TERM")
    end_parser.add_argument("--end-time", default="", help="when the time limit ends the job, Unix seconds")
    end_parser.add_argument("--state", type=Path, required=True, help="folder with the nodes' exit codes")
    end_parser.add_argument("--config", required=True, help="the resolved config of the run")
    args = parser.parse_args(argv)
    try:
        patience = Patience(_patience_s(args.config))
        patience.call(lambda: args.command(args))
    except (StorageLost, StoreAway) as error:
        print(error_line(error), file=sys.stderr, flush=True)
        return EXIT_STOPPED
    except UserError as error:
        print(error_line(error), file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return EXIT_DONE


def _patience_s(config_file: str | None) -> float:
    """Return `cluster.storage_patience_s` from a config file, or its default if `config_file` is None."""
    patience_s = ClusterConfig().storage_patience_s
    if config_file is None:
        return patience_s
    return Patience(patience_s).call(lambda: load_config(config_file)).cluster.storage_patience_s


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--job", required=True, help="Slurm's job id")
    parser.add_argument("--restart", type=int, default=0, help="how often Slurm has requeued the job")
    parser.add_argument(
        "--replacements", type=int, default=0, help="how often spare nodes have replaced others in this start"
    )


def _iso(seconds: str) -> str | None:
    """Convert Unix seconds to ISO 8601 in UTC, as used in the ledger; return None if `seconds` is no number."""
    if not re.fullmatch(r"\d+", seconds):
        return None
    return datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
