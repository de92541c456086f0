"""Write and read the ledger of a run, ledger.jsonl: every start, checkpoint and end, in order of time; and its jobs.

Guarantee: an event is on the disk (fsync) when `append` returns, so a crash cannot lose an event whose consequences
are on the disk. A torn last line of a killed process is dropped. Events are never rewritten, not even when steps
are repeated after a crash: the ledger keeps the history, metrics.jsonl keeps the result of each step once. The records
of a run's Slurm jobs, slurm/jobs.jsonl, are kept likewise; `history.py` reads both.

Limits: one writer at a time (rank 0, or node 0's supervisor after it has killed the ranks; of the jobs, the node that
runs the batch script). The ledger only records; `launcher` decides about restarts.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from electra_dist.errors import StoreAway
from electra_dist.run.folder import JOBS_FILE, LEDGER_FILE
from electra_dist.run.records import Count, DatedRecord, JsonlFile, Number, Time, append_record, read_records
from electra_dist.store.patience import Patience, patient, waiting, waits

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


class LedgerEvent(DatedRecord):
    """Event of a run, a line of ledger.jsonl.

    Every event has `time`, `event` and `step`. Each of the other fields is set for some kinds of event only.
    """

    event: str  # one of `Event`; another one of a newer version is read, too
    step: Count
    attempt: Count | None = None  # number of the start of the run, from 1
    ranks: Count | None = None
    repeated: Count = 0  # steps of earlier starts that this start repeats
    setup_s: dict[str, Number] = {}  # by the names of `train/trainer.py`, like `spent_s`
    changed: dict[str, str] = {}  # settings that differ from the checkpoint's
    was: Count | None = None  # version of random draws and rounding before "new_numerics"
    now: Count | None = None  # and from then on
    stall_s: Number = 0  # how long a checkpoint stopped training
    wait_s: Number = 0  # how long it waited for the previous save before
    write_s: Number = 0
    why: str = ""  # reason of an end
    spent_s: dict[str, Number] | None = None  # since the first step of this start
    reason: str | None = None  # why a checkpoint was set aside
    fault: str | None = None  # which prevented the update of a step
    suspect: str | None = None  # row whose loss stands out in that step
    skip_from: Count | None = None  # first step that a rollback skips
    skip_to: Count | None = None  # and the last one


class JobSubmitted(DatedRecord):
    """Submission of jobs to Slurm by a person, a line of slurm/jobs.jsonl."""

    event: Literal["submit"]
    jobs: list[str] = []
    script: str = ""
    nodes: Count = 0


class JobBegan(DatedRecord):
    """Start of the ranks by a Slurm job, a line of slurm/jobs.jsonl."""

    event: Literal["begin"]
    job: str
    restart: Count  # how often Slurm had requeued the job
    replacements: Count = 0  # how often spare nodes had replaced other nodes since the last requeue
    nodes: str = ""  # their names, separated by commas
    submitted: Time | None = None
    started: Time | None = None
    ledger_events: Count  # that the ledger had by then
    checkpoint_step: Count = 0  # of the newest checkpoint by then
    uptime_s: Number | None = None  # by the node's boot clock


class JobEnded(DatedRecord):
    """End of the ranks of a Slurm job, a line of slurm/jobs.jsonl."""

    event: Literal["end"]
    job: str
    restart: Count
    replacements: Count = 0
    codes: dict[str, int] = {}  # exit codes of the nodes
    ledger_events: Count = 0
    checkpoint_step: Count = 0
    verdict: str  # action that follows (launcher/electra_launcher/slurm/job.py)
    why: str = ""


JobRecord = JobSubmitted | JobBegan | JobEnded
_JOB_RECORDS: dict[str, type[JobRecord]] = {"submit": JobSubmitted, "begin": JobBegan, "end": JobEnded}


class Ledger:
    """Writer of ledger.jsonl, the history of a run's starts, checkpoints and ends. One process has one at a time.

    Two threads may use it: the step loop and the checkpoint writer. An event that the disk refuses stays in memory and
    is written before the next one; never append it again.
    """

    def __init__(self, run_dir: Path, patience: Patience | None = None) -> None:
        """Open the file.

        If the disk is full or away, `append`, `sync` and `close` wait for it as long as `patience` says; None: not at
        all.
        """
        self._run_dir = Path(run_dir)
        self.patience = patience
        self._file = JsonlFile(self._run_dir / LEDGER_FILE)
        self._lock = threading.Lock()

    def append(self, event: Event, step: int, **details: Any) -> None:
        """Append an event with the present time (UTC), and return when it is on the disk (fsync).

        If the disk is full or away, wait for it as long as the patience says, then raise StorageLost. Without a
        patience, raise StoreAway at once.
        """
        try:
            self._append(event, step, details)
        except StoreAway:
            if self.patience is None:
                raise
            self.sync()  # waits for the disk, then writes the event, which `self._file` has kept

    def append_soon(self, event: Event, step: int, **details: Any) -> None:
        """Append an event; if the disk is full or away, keep it in memory instead, until the next event is written."""
        with contextlib.suppress(StoreAway):
            self._append(event, step, details)

    def append_once(self, event: Event, step: int, **details: Any) -> None:
        """Append an event as `append_soon` does, unless the ledger already has an event of this kind at this step."""
        if not has_event(self._run_dir, event, step, patience=self.patience):
            self.append_soon(event, step, **details)

    def _append(self, event: Event, step: int, details: dict[str, Any]) -> None:
        """Append an event with fsync; if the disk refuses, the file keeps it for `sync`, and StoreAway is raised."""
        with self._lock:
            self._file.append(LedgerEvent(time=_now(), event=event, step=step, **details))
            self._file.sync()

    @waits
    def sync(self) -> None:
        """Write the events that a full disk has refused before, with fsync; raise StoreAway if it still refuses."""
        with self._lock:
            self._file.sync()

    def close(self, *, waits: bool = True) -> None:
        """Write the events that a full disk has refused, and close the file; after StoreAway, call `close` again.

        If `waits` is False, the disk is tried only once, whatever the patience.
        """
        waiting(self.patience if waits else None, self._file.close)

    def discard(self) -> None:
        """Close the ledger file without the events that the disk has refused. Calling it twice is fine."""
        self._file.discard()


@patient
def read_ledger(run_dir: Path, *, patience: Patience | None = None) -> list[LedgerEvent]:
    """Return the events of a run's ledger.jsonl, oldest first; [] if there is no file.

    If the disk is away, wait for it as long as `patience` says; None: not at all.
    """
    return list(read_records(Path(run_dir) / LEDGER_FILE, LedgerEvent.model_validate))


def has_event(run_dir: Path, event: Event, step: int, *, patience: Patience | None = None) -> bool:
    """Return whether the ledger has an event of this kind at this step, so that a restart need not record it again."""
    events = read_ledger(run_dir, patience=patience)
    return any(record.event == event and record.step == step for record in events)


def append_job(run_dir: Path, event: str, **details: Any) -> None:
    """Append a "submit", "begin" or "end" with the present time (UTC) to slurm/jobs.jsonl, with fsync."""
    append_record(Path(run_dir) / JOBS_FILE, _job_record({"time": _now(), "event": event, **details}))


def read_jobs(run_dir: Path) -> list[JobRecord]:
    """Return the records of a run's Slurm jobs (submissions, begins and ends), oldest first; [] if there are none."""
    return list(read_records(Path(run_dir) / JOBS_FILE, _job_record))


def _job_record(fields: dict[str, Any]) -> JobRecord:
    event = fields.get("event")
    if not isinstance(event, str) or event not in _JOB_RECORDS:
        raise ValueError(f"the value of `event` is wrong: it should be one of {', '.join(_JOB_RECORDS)}")
    return _JOB_RECORDS[event].model_validate(fields)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
