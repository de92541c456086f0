"""Write and read the ledger of a run, ledger.jsonl: every start, checkpoint and end, in order of time.

Guarantee: an event is on the disk (fsync) when `append` returns, so a crash cannot lose an event whose consequences
are on the disk. A torn last line of a killed process is dropped. Events are never rewritten, not even when steps
are repeated after a crash: the ledger keeps the history, metrics.jsonl keeps the result of each step once.

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
    """Writer of ledger.jsonl, the history of a run's starts, checkpoints and ends. Only rank 0 has one."""

    def __init__(self, run_dir: Path) -> None:
        self._file = JsonlFile(Path(run_dir) / LEDGER_FILE)

    def append(self, event: Event, step: int, **details: Any) -> None:
        """Append an event with the current time (UTC), and return when it is on the disk (fsync).

        Raises StoreAway if the disk is full or away. The event stays in memory then: do not append it again, but call
        `sync` later.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.append({"time": now, "event": event, "step": step, **details})
        self._file.sync()

    def sync(self) -> None:
        """Write the events that the disk has refused, with fsync. Raises StoreAway if the disk refuses again."""
        self._file.sync()

    def close(self) -> None:
        """Write the events that the disk has refused, and close the file; after StoreAway, call `close` again."""
        self._file.close()

    def discard(self) -> None:
        """Close the ledger file without the events that the disk has refused. Calling it twice is fine."""
        self._file.discard()


def read_ledger(path: Path) -> list[Record]:
    """Return the events of a ledger.jsonl, oldest first; [] without a file. `path` is the file or its run folder."""
    path = Path(path)
    file = path / LEDGER_FILE if path.is_dir() else path
    return read_records(file, ledger_fault)


def read_jobs(run_dir: Path) -> list[Record]:
    """Return the records of a run's Slurm jobs (submissions, begins and ends), oldest first; [] without Slurm."""
    return read_records(Path(run_dir) / JOBS_FILE, job_fault)


def has_event(run_dir: Path, event: Event, step: int) -> bool:
    """Return whether the ledger has an event of this kind and step, so that a restart need not record it again."""
    return any(record["event"] == event and record["step"] == step for record in read_ledger(run_dir))


def proves_checkpoint(event: Record) -> bool:
    """Return whether an event of the ledger proves that a checkpoint of its step was saved.

    A "resume" proves it, too: if a process is killed right after a save, the ledger lacks the event "checkpoint".
    """
    return event["event"] in ("checkpoint", "resume")


def newest_checkpoint(ledger: Sequence[Record]) -> int:
    """Return the highest step at which a checkpoint was ever saved; 0 before the first one.

    A larger result than before means that the run has made progress: steps that a restart saves again do not change
    it.
    """
    return max((event["step"] for event in ledger if proves_checkpoint(event)), default=0)


def start_identity(record: Record) -> tuple[str, int, int]:
    """Return job id, number of requeues and of replaced nodes, by which a "begin" record finds its "end" record.

    The ranks of one job start again when Slurm requeues the job, and when a spare node replaces one of its nodes.
    """
    return record["job"], record["restart"], record.get("replacements", 0)
