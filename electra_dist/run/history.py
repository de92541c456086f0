"""Read the history of a run from its ledger and its jobs: every start of the run, and how each of its jobs ended.

Guarantee: pure functions of the events in ledger.jsonl and of the records in slurm/jobs.jsonl, both oldest first.
This is the only place that decides where a start begins and what ended it; goodput, the interval between checkpoints,
verdicts on Slurm jobs, `electra-dist status` and the report are functions of it.

A start ends with the last of its events "done", "stop", "storage", "crash", "unhealthy" and "rollback". Without one it
goes on, or was killed. The steps that a start made after the event with its seconds (`spent_s`) are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Literal, cast, get_args

from electra_dist.run.ledger import JobBegan, JobEnded, JobRecord, JobSubmitted, LedgerEvent

Ending = Literal["done", "stop", "storage", "crash", "unhealthy", "rollback"]
State = Literal["finished", "living", "held", "waiting", "stopped", "dead", "not begun"]

STARTS = ("start", "resume")
ENDINGS: tuple[str, ...] = get_args(Ending)


@dataclass(frozen=True)
class Start:
    """One start of a run (first or restart), from the launch of its processes to their end. Times are Unix seconds."""

    index: int  # of its first event in the ledger
    events: Sequence[LedgerEvent]  # the first one is "start" or "resume"

    @property
    def ended_by(self) -> Ending | None:
        """Return the event that ended this start of the run, or None if it goes on or was killed."""
        endings = [event.event for event in self.events if event.event in ENDINGS]
        return cast(Ending, endings[-1]) if endings else None

    @property
    def setup(self) -> Mapping[str, float]:
        """Return the seconds from the launch of this start to its first event by activity: import, build, restore."""
        return self.events[0].setup_s

    @property
    def began(self) -> float:
        """Return when the process of this start was launched."""
        return self.events[0].unix_s - sum(self.setup.values())

    @property
    def last(self) -> float:
        """Return the time of the last event of this start."""
        return max(event.unix_s for event in self.events)

    @property
    def first_step(self) -> int:
        """Return the number of steps that were done when this start began."""
        return self.events[0].step

    @property
    def repeated(self) -> int:
        """Return how many steps of earlier starts this start repeats."""
        return self.events[0].repeated

    @cached_property
    def newest(self) -> LedgerEvent:
        """Return the newest event that records how time was spent, or the first event if there is none."""
        with_times = [event for event in self.events if event.spent_s is not None]
        return with_times[-1] if with_times else self.events[0]

    @property
    def spent(self) -> Mapping[str, float]:
        """Return the seconds by activity: "first" (first step), "step" (other steps), "data", "stall" and "eval"."""
        return self.newest.spent_s or {}

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps this start has made, up to its newest event that records seconds."""
        return max(0, self.newest.step - self.first_step)

    @property
    def compile_s(self) -> float:
        """Return how many seconds longer the first step took than the mean of the others; 0 if there are none."""
        num_other_steps = self.num_steps - 1
        if num_other_steps <= 0:
            return 0.0
        first_step_s = self.spent.get("first", 0.0)
        mean_other_step_s = self.spent.get("step", 0.0) / num_other_steps
        return max(0.0, first_step_s - mean_other_step_s)

    @property
    def steps_s(self) -> float:
        """Return the seconds of all steps, without compilation and without waiting for rows."""
        all_steps_s = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        data_s = self.spent.get("data", 0.0)
        return max(0.0, all_steps_s - data_s - self.compile_s)


def starts(ledger: Sequence[LedgerEvent]) -> list[Start]:
    """Return every start of the run in the ledger, the first one and the restarts, oldest first.

    An event that a process wrote late, after the next start had begun, is left out: it carries its own start's number.
    """
    indexes = [index for index, event in enumerate(ledger) if event.event in STARTS]
    return [
        Start(index, [event for event in ledger[index:end] if event.attempt in (None, ledger[index].attempt)])
        for index, end in itertools.pairwise([*indexes, len(ledger)])
    ]


def seconds_per_step(starts: Sequence[Start]) -> float:
    """Return the mean seconds of a step over all starts, without compilation and waits for data; 0 without steps."""
    num_steps = sum(start.num_steps for start in starts)
    if num_steps == 0:
        return 0.0
    return sum(start.steps_s for start in starts) / num_steps


def proves_checkpoint(event: LedgerEvent) -> bool:
    """Return whether an event of the ledger proves that a checkpoint of its step was saved.

    A "resume" proves it, too: if a process is killed right after a save, the ledger lacks the event "checkpoint".
    """
    return event.event in ("checkpoint", "resume")


def newest_checkpoint(ledger: Sequence[LedgerEvent]) -> int:
    """Return the highest step at which a checkpoint was ever saved; 0 before the first one.

    A larger result than before means that the run has made progress: steps that a restart saves again do not change
    it.
    """
    return max((event.step for event in ledger if proves_checkpoint(event)), default=0)


def events_at_newest_checkpoint(ledger: Sequence[LedgerEvent]) -> int:
    """Return the number of events in the ledger up to the first record of the newest checkpoint; 0 if none exists."""
    reached_step = newest_checkpoint(ledger)
    for num_events, event in enumerate(ledger, start=1):
        if proves_checkpoint(event) and event.step == reached_step:
            return num_events
    return 0


@dataclass(frozen=True, kw_only=True)
class Link:
    """One start of a run's ranks by a Slurm job: the records of its begin and of its end.

    A job starts the ranks again if Slurm has requeued it, or if spare nodes have replaced other nodes in it.
    """

    begin: JobBegan
    end: JobEnded | None  # None: the job runs, or it ended without a verdict

    @property
    def session(self) -> str:
        """Return the name of this start of the ranks, such as job-4711-0 (`session_of`)."""
        return session_of(self.begin)

    @property
    def submitted_and_began(self) -> tuple[float, float]:
        """Return the Unix times of the job's submission (if unknown: its begin) and begin (if unknown: its record)."""
        began = _unix_s(self.begin.started, self.begin.unix_s)
        return _unix_s(self.begin.submitted, began), began


def links(jobs: Sequence[JobRecord]) -> list[Link]:
    """Return each start of the ranks by a Slurm job, oldest first."""
    ends = {session_of(record): record for record in jobs if isinstance(record, JobEnded)}
    begins = [record for record in jobs if isinstance(record, JobBegan)]
    return [Link(begin=begin, end=ends.get(session_of(begin))) for begin in begins]


def session_of(record: JobBegan | JobEnded) -> str:
    """Return the name of a start of the ranks by a Slurm job, as job.sh makes it: job-ID-RESTART[-REPLACEMENTS]."""
    session = f"job-{record.job}-{record.restart}"
    return f"{session}-{record.replacements}" if record.replacements else session


def since_submission(jobs: Sequence[JobRecord]) -> Sequence[JobRecord]:
    """Return the records of Slurm jobs from the newest submission by a person on; all if there was no submission."""
    submissions = [number for number, record in enumerate(jobs) if isinstance(record, JobSubmitted)]
    return jobs[submissions[-1] :] if submissions else jobs


def _unix_s(time: str | None, default: float) -> float:
    return default if time is None else datetime.fromisoformat(time).timestamp()


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """What is known of a run apart from its ledger; without Slurm, the fields about jobs stay False."""

    now: float  # Unix seconds
    sign_of_life: float | None  # Unix seconds of the newest heartbeat, metrics record or event; None: never
    patience_s: float  # how long a living run may be silent
    running: bool = False  # one of its jobs runs
    pending: bool = False  # one of its jobs waits in the queue and will start without a person
    held: bool = False  # one of its jobs is held until a person releases it
    owner_has_ended: bool = False  # whoever watched over the ranks of the run is known to be dead
    is_starting: bool = False  # a living process has taken the lease of the run folder since the last event


def newest_ending(ledger: Sequence[LedgerEvent]) -> Ending | None:
    """Return how the run ended, or None if the ledger's last event is no end.

    None means that the run goes on, was killed, or never began.
    """
    has_ended = bool(ledger) and ledger[-1].event in ENDINGS
    return cast(Ending, ledger[-1].event) if has_ended else None


def run_state(ledger: Sequence[LedgerEvent], evidence: RunEvidence) -> State:
    """Classify a run by its ledger and by what else is known of it.

    The first of these decides: "done" in the ledger, Slurm's queue, a start that has recorded nothing yet, the
    ledger's last event, the newest sign of life.

    A run is "stopped" on request or for lack of storage, and "dead" after a fault or after too long a silence. Without
    a job in Slurm and without a recorded end, it counts as living until its owner is known to have ended, or until its
    newest sign of life is older than `evidence.patience_s`.
    """
    if any(event.event == "done" for event in ledger):
        return "finished"

    # Slurm's queue is right even if the run is silent.
    if evidence.running:
        return "living"
    if evidence.held:
        return "held"
    if evidence.pending:
        return "waiting"

    if evidence.is_starting:
        return "living"

    # No job is known: the ledger and the newest sign of life decide.
    if not ledger and evidence.sign_of_life is None:
        return "not begun"
    ending = newest_ending(ledger)
    if ending in ("stop", "storage"):
        return "stopped"
    if ending in ("crash", "unhealthy"):
        return "dead"
    silent_since = evidence.sign_of_life or 0.0  # without any sign of life: since 1970
    if not evidence.owner_has_ended and evidence.now - silent_since < evidence.patience_s:
        return "living"
    return "dead"
