"""Write and read the ledger of a run, ledger.jsonl: every start, checkpoint and end, in order of time.

Guarantee: an event is on the disk (fsync) when `append` returns, so nothing that the process does afterwards can
survive a crash without the event. A torn last line of a killed process is dropped. Events are never rewritten, not
even when steps are repeated after a crash: the ledger keeps the history, metrics.jsonl keeps the result of each step
once.

Limits: one writer (rank 0). The ledger only records; `launcher` decides about restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from electra_dist.run.folder import JOBS_FILE, LEDGER_FILE
from electra_dist.run.jsonl import JsonlFile, Record, read_records
from electra_dist.run.record_checks import job_fault, ledger_fault

Event = Literal[
    "start",
    "resume",
    "new_numerics",
    "checkpoint",
    "set_aside",
    "stopped_step",
    "rollback",
    "stop",
    "storage",
    "done",
    "unhealthy",
    "crash",
]


class Ledger:
    """Writer of ledger.jsonl, the history of a run's starts, checkpoints and ends. Only rank 0 has one.

    Supervisors and the Slurm batch script read this file to decide whether the run is done or must be restarted.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open the ledger for appending."""
        self._file = JsonlFile(Path(run_dir) / LEDGER_FILE)

    def append(self, event: Event, step: int, **details: Any) -> None:
        """Append an event with the current time (UTC) to the ledger, and return when it is on the disk (fsync)."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.append({"time": now, "event": event, "step": step, **details})
        self._file.sync()

    def sync(self) -> None:
        """Write the events that the disk has refused so far, and return when they are on it. Raises as `append`."""
        self._file.sync()

    def close(self) -> None:
        """Write the events that the disk has refused so far, and close the file. Calling it twice is fine."""
        self._file.close()

    def discard(self) -> None:
        """Close the ledger file without the events that the disk has refused. Calling it twice is fine."""
        self._file.discard()


def read_ledger(path: Path) -> list[Record]:
    """Return the events of a ledger, oldest first; an empty list if there is no file."""
    path = Path(path)
    file = path / LEDGER_FILE if path.is_dir() else path
    return read_records(file, ledger_fault)


def read_jobs(run_dir: Path) -> list[Record]:
    """Return the records of a run's Slurm jobs (slurm/jobs.jsonl), oldest first; an empty list without Slurm."""
    return read_records(Path(run_dir) / JOBS_FILE, job_fault)


def has_event(run_dir: Path, event: Event, step: int) -> bool:
    """Return whether the ledger of a run has an event of this kind and step.

    Some decisions, such as a rollback, are recorded as an event first and stored in a file of their own afterwards.
    """
    return any(record["event"] == event and record["step"] == step for record in read_ledger(run_dir))


def proves_checkpoint(event: Record) -> bool:
    """Return whether an event proves that there was a checkpoint of its step.

    A resume does, too: a start that was killed right after its commit has not recorded the checkpoint itself.
    """
    return event["event"] in ("checkpoint", "resume")


def newest_checkpoint(ledger: Sequence[Record]) -> int:
    """Return the highest step at which a checkpoint was ever saved; 0 before the first one.

    After a restart, steps may be saved again; only a checkpoint of a higher step changes the result.
    """
    return max((event["step"] for event in ledger if proves_checkpoint(event)), default=0)


def start_identity(record: Record) -> tuple[str, int, int]:
    """Return what identifies one start of the ranks in jobs.jsonl, so that its "begin" and "end" can be matched."""
    return record["job"], record["restart"], record.get("replacements", 0)
