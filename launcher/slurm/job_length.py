"""Check the time limit of a job: its format, and that it leaves time to train between the start and the last save."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from electra_dist.errors import UserError
from electra_dist.run.ledger import LedgerEvent

ASSUMED_START_S = 30  # seconds that a start and a save take together, if the run has measured no start yet
# The formats in `man sbatch`: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, and two words that mean no limit.
_TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


def check_time_limit(time_limit: str | None) -> None:
    """Raise a UserError unless a time limit has a format of sbatch's --time or is None (the partition's limit)."""
    if time_limit is None or _TIME_LIMIT.fullmatch(time_limit):
        return
    raise UserError(
        f"--time {time_limit}: not a time limit of Slurm; write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, for "
        f"example --time 24:00:00"
    )


def check_job_length(time_limit: str | None, signal_ahead_s: int, ledger: Sequence[LedgerEvent]) -> None:
    """Raise a UserError if a job has no time to train between its start and the signal that tells it to save and end.

    Slurm sends the signal `signal_ahead_s` seconds before the time limit. The seconds of a start and a save are the
    medians in the ledger, or 30 s if no start is recorded. A time limit of None (the partition's, unknown) passes.
    """
    limit_s = seconds_of(time_limit)
    measured_s = measured_start_s(ledger)
    start_and_save_s = ASSUMED_START_S if measured_s is None else measured_s
    needed_s = signal_ahead_s + start_and_save_s
    if limit_s is None or limit_s > needed_s:
        return
    source = "is assumed for" if measured_s is None else "this run has needed"
    raise UserError(
        f"--time {time_limit}: {limit_s} s are not longer than --signal-ahead {signal_ahead_s} and the "
        f"{start_and_save_s:.0f} s that {source} a start and a save, so a job would make no step; set --time "
        f"to more than {needed_s / 60:.0f} minutes, or a lower --signal-ahead"
    )


def measured_start_s(ledger: Sequence[LedgerEvent]) -> float | None:
    """Return the seconds that a start and a save of this run take, as medians; None if no start is recorded."""
    starts_s = [sum(event.setup_s.values()) for event in ledger if event.setup_s]
    saves_s = [event.stall_s + event.write_s for event in ledger if event.event == "checkpoint"]
    if not starts_s:
        return None
    median_save_s = statistics.median(saves_s) if saves_s else 0.0
    return statistics.median(starts_s) + median_save_s


def seconds_of(time_limit: str | None) -> int | None:
    """Convert a time limit in a format of sbatch's --time to seconds; None for UNLIMITED, INFINITE or no limit."""
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
