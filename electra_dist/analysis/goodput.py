"""Where a run's time went, from its ledger: useful steps, and everything that was not.

Guarantee: pure functions of the events in ledger.jsonl and, for what happens before a process lives, of the job lines
in slurm/jobs.jsonl. The parts add up to the wall-clock time from the first submission (or process) to the last event.

    queue    waiting for nodes: submitted (or requeued) to started
    boot     job started to the rank's process: batch script, srun, deepspeed
    import, build, restore    process to first step (`setup_s` of start and resume)
    compile  what the first step took longer than a step
    data     waiting for rows
    stall    checkpoint copies, and waits for the previous one
    eval     held-out evaluations
    lost     steps that were repeated later
    useful   steps that were kept
    down     the rest: a fault until it is noticed, killing, reports

Goodput is useful / (wall - queue): what the job system takes is not the run's fault, and is shown beside it.

Where it stops: events without `spent_s` (an older ledger, or a start that was killed before its first checkpoint) are
filled in from the times between events; the seconds after the last event are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from electra_dist.run.formats import format_duration
from electra_dist.run.jsonl import Record

STARTS = ("start", "resume")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of a whole run, by what they went to."""

    queue: float = 0.0
    boot: float = 0.0
    imports: float = 0.0
    build: float = 0.0
    restore: float = 0.0
    compile: float = 0.0
    data: float = 0.0
    stall: float = 0.0
    eval: float = 0.0
    lost: float = 0.0
    useful: float = 0.0
    down: float = 0.0
    steps_lost: int = 0
    starts: int = 0

    @property
    def wall(self) -> float:
        """All of it."""
        return math.fsum(self.parts().values())

    @property
    def fraction(self) -> float | None:
        """Goodput; None before anything has happened."""
        ours = self.wall - self.queue
        return self.useful / ours if ours > 0 else None

    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order of a run's life."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("steps_lost", "starts")}

    def described(self) -> str:
        """Where the time went, in one line."""
        parts = [f"{name} {format_duration(seconds)}" for name, seconds in self.parts().items() if seconds >= 0.5]
        return f"{', '.join(parts)}; {self.starts} starts, {self.steps_lost:,} steps lost"


@dataclass(frozen=True)
class RunStart:
    """A start of the ranks and what is known of it. Times are Unix seconds."""

    began: float  # the process
    setup: Mapping[str, float]
    first_step: int
    repeated: int  # steps of earlier starts that this one repeats
    last: float  # the last that was heard of it
    last_step: int  # steps that `spent` covers end here
    spent: Mapping[str, float]

    @property
    def num_steps(self) -> int:
        """Steps that `spent` covers."""
        return max(0, self.last_step - self.first_step)

    @property
    def compile_s(self) -> float:
        """What the first step took longer than the others do."""
        first, others = self.spent.get("first", 0.0), self.num_steps - 1
        return max(0.0, first - self.spent.get("step", 0.0) / others) if others > 0 else 0.0

    @property
    def steps_s(self) -> float:
        """All steps, without compilation and without waiting for rows."""
        whole = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        return max(0.0, whole - self.spent.get("data", 0.0) - self.compile_s)


def goodput(ledger: Sequence[Record], jobs: Sequence[Record] = ()) -> Goodput:
    """The account of a run so far."""
    starts = starts_of(ledger)
    if not starts:
        return Goodput()
    step_s = seconds_per_step(starts)
    gone = [_queue_and_boot(ledger, jobs, number, starts) for number in range(len(starts))]
    useful = lost = 0.0
    steps_lost = 0
    for number, start in enumerate(starts):
        following = starts[number + 1] if number + 1 < len(starts) else None
        kept = (
            start.num_steps
            if following is None
            else min(start.num_steps, max(0, following.first_step - start.first_step))
        )
        own_step_s = start.steps_s / start.num_steps if start.num_steps else step_s
        useful += kept * own_step_s
        lost += (start.num_steps - kept) * own_step_s
        if following is not None:
            unseen = max(0, following.repeated - (start.num_steps - kept))  # steps after the last that was heard
            lost += min(unseen * own_step_s, max(0.0, following.began - start.last))
            steps_lost += max(following.repeated, start.num_steps - kept)
    parts = {
        "queue": sum(queue for queue, _ in gone),
        "boot": sum(boot for _, boot in gone),
        "imports": _total(starts, "setup", "import"),
        "build": _total(starts, "setup", "build"),
        "restore": _total(starts, "setup", "restore"),
        "compile": sum(start.compile_s for start in starts),
        "data": _total(starts, "spent", "data"),
        "stall": _total(starts, "spent", "stall"),
        "eval": _total(starts, "spent", "eval"),
        "lost": lost,
        "useful": useful,
    }
    wall = starts[-1].last - min(starts[0].began, _first_submission(jobs))
    down = max(0.0, wall - math.fsum(parts.values()))
    return Goodput(**parts, down=down, steps_lost=steps_lost, starts=len(starts))


def start_line(ledger: Sequence[Record], jobs: Sequence[Record] = ()) -> str:
    """What a start says about itself once its start or resume event is in the ledger."""
    starts = [event for event in ledger if event["event"] in STARTS]
    event = starts[-1]
    said = f"restored step {event['step']:,}" if event["event"] == "resume" else f"start at step {event['step']:,}"
    saved = [e for e in ledger if e["event"] == "checkpoint" and e["step"] == event["step"]]
    if saved and event["event"] == "resume":
        said += f", age {format_duration(_time(event) - _time(saved[-1]))}"
    if len(starts) > 1:
        said += f", {event.get('repeated', 0):,} steps lost"
    fraction = goodput(ledger, jobs).fraction
    return said if fraction is None or len(starts) == 1 else f"{said}, goodput {100 * fraction:.1f} %"


def starts_of(ledger: Sequence[Record]) -> list[RunStart]:
    """What is known of each start, in order."""
    numbers = [n for n, event in enumerate(ledger) if event["event"] in STARTS]
    starts = []
    for number, following in zip(numbers, [*numbers[1:], len(ledger)]):
        event, later = ledger[number], _own(ledger, number, following)
        setup = event.get("setup_s", {})
        told = [e for e in later if e["event"] in ("checkpoint", "stop", "done", "crash", "unhealthy", "rollback")]
        last = told[-1] if told else event
        starts.append(
            RunStart(
                began=_time(event) - sum(setup.values()),
                setup=setup,
                first_step=event["step"],
                repeated=event.get("repeated", 0),
                last=max(_time(e) for e in [event, *later]),
                last_step=last["step"],
                spent=last["spent_s"] if "spent_s" in last else _guessed(event, told),
            )
        )
    return starts


def _own(ledger: Sequence[Record], number: int, following: int) -> list[Record]:
    """The events of one start; none that another attempt, cut off and given up, wrote late."""
    attempt = ledger[number].get("attempt")
    return [e for e in ledger[number + 1 : following] if e.get("attempt", attempt) == attempt]


def _guessed(event: Record, told: Sequence[Record]) -> dict[str, float]:
    """`spent_s` where no event has it: all time is the steps', but for the stalls."""
    if not told:
        return {}
    stall = sum(e.get("stall_s", 0.0) + e.get("wait_s", 0.0) for e in told)
    return {"step": max(0.0, _time(told[-1]) - _time(event) - stall), "stall": stall}


def seconds_per_step(starts: Sequence[RunStart]) -> float:
    """Mean of all steps, without compilation and waits; 0 before the first."""
    steps = sum(start.num_steps for start in starts)
    return sum(start.steps_s for start in starts) / steps if steps else 0.0


def _queue_and_boot(
    ledger: Sequence[Record], jobs: Sequence[Record], number: int, starts: Sequence[RunStart]
) -> tuple[float, float]:
    """Seconds before a start that its jobs waited for nodes, and then took to bring the process up."""
    at = [n for n, event in enumerate(ledger) if event["event"] in STARTS]
    before = starts[number - 1].last if number else -math.inf
    begins = [
        job
        for job in jobs
        if job["event"] == "begin" and (at[number - 1] if number else -1) < job["ledger_events"] <= at[number]
    ]
    queue, boot = 0.0, 0.0
    for job in begins:
        started = _seconds(job.get("started")) or _time(job)
        asked = max(before, _seconds(job.get("submitted")) or started)
        queue += max(0.0, started - asked)
        boot = max(0.0, starts[number].began - started)  # of the job that came through
        before = _time(job)
    return queue, boot


def _first_submission(jobs: Sequence[Record]) -> float:
    times = [_seconds(job.get("submitted")) for job in jobs if job["event"] == "begin"]
    return min((t for t in times if t is not None), default=math.inf)


def _total(starts: Sequence[RunStart], which: str, name: str) -> float:
    return math.fsum(getattr(start, which).get(name, 0.0) for start in starts)


def _time(event: Record) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()
