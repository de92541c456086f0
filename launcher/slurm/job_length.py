"""Check the time limit of a job: its form, and that it leaves time for steps after a start and before the save."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from electra_dist.errors import UserError
from electra_dist.run.jsonl import Record

ASSUMED_START_S = 30  # of a start and a save, as long as the run has measured none
# As `man sbatch` lists the forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, and the words for no limit.
_TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


def check_time_limit(time_limit: str | None) -> None:
    """Raise UserError unless a time limit has a form that sbatch's --time accepts; None is the partition's limit."""
    if time_limit is None or _TIME_LIMIT.fullmatch(time_limit):
        return
    raise UserError(
        f"--time {time_limit}: not a time limit of Slurm; write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, for "
        f"example --time 24:00:00"
    )


def check_job_length(time_limit: str | None, signal_ahead_s: int, ledger: Sequence[Record]) -> None:
    """Refuse a time limit that leaves no time for steps between the start of a job and the request to stop.

    The seconds of a start and of a save are those that the run has measured; `ASSUMED_START_S` before it has.

    Args:
        time_limit: in a form of sbatch's --time; None: the partition's limit, which is not known.
        signal_ahead_s: how long before the limit the ranks are asked to save and stop.
        ledger: events of the run; may be empty.

    Raises:
        UserError: the limit is too short.
    """
    limit_s = seconds_of(time_limit)
    start_s = measured_start_s(ledger)
    is_measured = start_s is not None
    needed_s = signal_ahead_s + (ASSUMED_START_S if start_s is None else start_s)
    if limit_s is None or limit_s > needed_s:
        return
    source = "this run has needed" if is_measured else "is assumed for"
    raise UserError(
        f"--time {time_limit}: {limit_s} s are not longer than --signal-ahead {signal_ahead_s} and the "
        f"{needed_s - signal_ahead_s:.0f} s that {source} a start and a save, so a job would make no step; set --time "
        f"to more than {needed_s / 60:.0f} minutes, or a lower --signal-ahead"
    )


def measured_start_s(ledger: Sequence[Record]) -> float | None:
    """Return the median seconds of the starts of a run, plus those of its saves; None without a start. Pure."""
    starts = [sum(event["setup_s"].values()) for event in ledger if event.get("setup_s")]
    saves = [
        event.get("stall_s", 0.0) + event.get("write_s", 0.0) for event in ledger if event["event"] == "checkpoint"
    ]
    if not starts:
        return None
    return statistics.median(starts) + (statistics.median(saves) if saves else 0.0)


def seconds_of(time_limit: str | None) -> int | None:
    """Return the seconds of a time limit in a form of sbatch's --time; None if there is none, or no limit.

    The forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    if time_limit is None or not time_limit[0].isdigit():
        return None
    days, has_days, rest = time_limit.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if has_days:
        hours, minutes, seconds = (numbers + [0, 0])[:3]
        return 86400 * int(days) + 3600 * hours + 60 * minutes + seconds
    if len(numbers) == 3:
        hours, minutes, seconds = numbers
        return 3600 * hours + 60 * minutes + seconds
    minutes, seconds = (numbers + [0])[:2]
    return 60 * minutes + seconds
