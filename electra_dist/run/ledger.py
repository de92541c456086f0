"""ledger.jsonl: where a run stands, and every time that it began and ended.

Guarantee: an event is on the disk (fsync) when `append` returns, so the ledger is at least as new as anything the
process did afterwards. A torn last line of a killed process is dropped. Events are never rewritten, also not when
steps are repeated after a crash: the ledger tells what happened, metrics.jsonl what holds.

Cost: one fsync an event, some milliseconds; events are rare.

Where it stops: one writer (rank 0). It records; `launcher` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from electra_dist.run.folder import JOBS_FILE, LEDGER_FILE
from electra_dist.run.jsonl import JsonlFile, Record, read_records

Event = Literal[
    "start", "resume", "checkpoint", "set_aside", "stopped_step", "rollback", "stop", "done", "unhealthy", "crash"
]


class Ledger:
    """Appends events to `run_dir`/ledger.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._file = JsonlFile(Path(run_dir) / LEDGER_FILE)

    def append(self, event: Event, step: int, **details: Any) -> None:
        """Record `event` at `step` (optimizer steps done), with JSON-able details; durable on return."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.append({"time": now, "event": event, "step": step, **details})
        self._file.sync()

    def close(self) -> None:
        """Close the file. Calling it twice is fine."""
        self._file.close()


def read_ledger(path: Path) -> list[Record]:
    """The events of a ledger.jsonl (or of the run folder that holds it), oldest first; none without a file.

    `time` is ISO 8601 in UTC: `datetime.fromisoformat` reads it.
    """
    path = Path(path)
    return read_records(path / LEDGER_FILE if path.is_dir() else path)


def read_jobs(run_dir: Path) -> list[Record]:
    """The lines of RUN/slurm/jobs.jsonl, oldest first; none without a file."""
    return read_records(Path(run_dir) / JOBS_FILE)


def newest_checkpoint(ledger: Sequence[Record]) -> int:
    """The furthest step that was ever saved; 0 before the first. One that is saved again is no progress."""
    return max((event["step"] for event in ledger if event["event"] == "checkpoint"), default=0)
