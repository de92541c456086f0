"""Goodput: where the time of a run went, from its ledger.

Guarantee: pure functions of the events in ledger.jsonl and, for the time before a process starts, of the job lines in
slurm/jobs.jsonl. The parts add up to the wall-clock time from the first submission (or process) to the last event.

    queue    waiting for nodes: from submitted (or requeued) to started
    boot     from the start of the job to the rank's process: batch script, srun, deepspeed
    import, build, restore    from the process to the first step (`setup_s` of start and resume)
    compile  what the first step took longer than a usual step
    data     waiting for rows
    stall    checkpoint copies, and waits for the previous one
    eval     held-out evaluations
    lost     steps that were repeated later
    useful   steps that were kept
    down     everything not listed above: a fault until it is noticed, killing processes, reports

Goodput is useful / (wall - queue): the run is not to blame for the time in the queue, which is shown separately.

Limits: events without `spent_s` (an older ledger, or a start that was killed before its first checkpoint) are filled
in from the times between events. The seconds after the last event are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from electra_dist.run.formats import format_duration
from electra_dist.run.jsonl import Record

STARTS = ("start", "resume")
_PROGRESS_EVENTS = ("checkpoint", "stop", "done", "crash", "unhealthy", "rollback")  # they hold `spent_s`


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Account of a run's wall-clock time: seconds by what they were spent on.

    The parts add up to the time from the first submission to the last event; the module docstring defines each.
    """

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
    steps_lost: int = 0  # steps that were repeated later
    starts: int = 0  # starts of the ranks, the first included

    @property
    def wall(self) -> float:
        """Return the wall-clock seconds of the run: the sum of all parts."""
        return math.fsum(self.parts().values())

    @property
    def fraction(self) -> float | None:
        """Return the goodput, useful / (wall - queue), in [0, 1]; None while there is no time outside the queue."""
        outside_queue = self.wall - self.queue
        return self.useful / outside_queue if outside_queue > 0 else None

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part by its name, in the order in which a run comes to them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("steps_lost", "starts")}

    def described(self) -> str:
        """Return one line for people: all parts of at least half a second, the number of starts, the steps lost."""
        parts = [f"{name} {format_duration(seconds)}" for name, seconds in self.parts().items() if seconds >= 0.5]
        return f"{', '.join(parts)}; {self.starts} starts, {self.steps_lost:,} steps lost"


@dataclass(frozen=True)
class RunStart:
    """One start of the ranks, as the ledger records it. Times are Unix seconds."""

    began: float  # start of the process
    setup: Mapping[str, float]  # seconds by part: import, build, restore
    first_step: int  # steps that were done when it began
    repeated: int  # steps of earlier starts that this one repeats
    last: float  # time of its last event
    last_step: int  # steps that were done when `spent` was recorded
    spent: Mapping[str, float]  # seconds by part: first step, other steps, data, stall, eval

    @property
    def num_steps(self) -> int:
        """Return the number of steps that `spent` covers."""
        return max(0, self.last_step - self.first_step)

    @property
    def compile_s(self) -> float:
        """Return the seconds by which the first step was longer than the mean of the others; 0 with one step only."""
        num_others = self.num_steps - 1
        if num_others <= 0:
            return 0.0
        first_s = self.spent.get("first", 0.0)
        return max(0.0, first_s - self.spent.get("step", 0.0) / num_others)

    @property
    def steps_s(self) -> float:
        """Return the seconds of all steps, without compilation and without waiting for rows."""
        all_steps_s = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        return max(0.0, all_steps_s - self.spent.get("data", 0.0) - self.compile_s)


def goodput(ledger: Sequence[Record], jobs: Sequence[Record] = ()) -> Goodput:
    """Return where the time of a run went, up to its last event.

    Args:
        ledger: events of ledger.jsonl, oldest first.
        jobs: records of slurm/jobs.jsonl; without them queue and boot are 0, and their time counts as down.
    """
    starts = starts_of(ledger)
    if not starts:
        return Goodput()
    queue_and_boot = [_queue_and_boot(ledger, jobs, number, starts) for number in range(len(starts))]
    useful_s, lost_s, steps_lost = _useful_and_lost(starts)
    parts = {
        "queue": sum(queue_s for queue_s, _ in queue_and_boot),
        "boot": sum(boot_s for _, boot_s in queue_and_boot),
        "imports": _total(starts, "setup", "import"),
        "build": _total(starts, "setup", "build"),
        "restore": _total(starts, "setup", "restore"),
        "compile": sum(start.compile_s for start in starts),
        "data": _total(starts, "spent", "data"),
        "stall": _total(starts, "spent", "stall"),
        "eval": _total(starts, "spent", "eval"),
        "lost": lost_s,
        "useful": useful_s,
    }
    wall = starts[-1].last - min(starts[0].began, _first_submission(jobs))
    down = max(0.0, wall - math.fsum(parts.values()))
    return Goodput(**parts, down=down, steps_lost=steps_lost, starts=len(starts))


def _useful_and_lost(starts: Sequence[RunStart]) -> tuple[float, float, int]:
    """Return the seconds of steps that were kept, the seconds of steps that were repeated later, and their number.

    A step is kept if the next start began at a later step.
    """
    mean_step_s = seconds_per_step(starts)
    useful_s = 0.0
    lost_s = 0.0
    steps_lost = 0
    for number, start in enumerate(starts):
        following = starts[number + 1] if number + 1 < len(starts) else None
        num_kept = start.num_steps
        if following is not None:
            num_kept = min(start.num_steps, max(0, following.first_step - start.first_step))
        num_repeated = start.num_steps - num_kept
        step_s = start.steps_s / start.num_steps if start.num_steps else mean_step_s
        useful_s += num_kept * step_s
        lost_s += num_repeated * step_s
        if following is not None:
            num_unrecorded = max(0, following.repeated - num_repeated)  # steps after the last event of this start
            lost_s += min(num_unrecorded * step_s, max(0.0, following.began - start.last))
            steps_lost += max(following.repeated, num_repeated)
    return useful_s, lost_s, steps_lost


def start_line(ledger: Sequence[Record], jobs: Sequence[Record] = ()) -> str:
    """Return the line that a start prints: its step, the age of the checkpoint, the steps lost, the goodput so far.

    Args:
        ledger: events up to the start or resume event of this start, which must be there.
        jobs: records of slurm/jobs.jsonl.
    """
    starts = [event for event in ledger if event["event"] in STARTS]
    event = starts[-1]
    if event["event"] == "resume":
        line = f"restored step {event['step']:,}"
        checkpoints = [e for e in ledger if e["event"] == "checkpoint" and e["step"] == event["step"]]
        if checkpoints:
            line += f", age {format_duration(_time(event) - _time(checkpoints[-1]))}"
    else:
        line = f"start at step {event['step']:,}"
    if len(starts) == 1:
        return line
    line += f", {event.get('repeated', 0):,} steps lost"
    fraction = goodput(ledger, jobs).fraction
    if fraction is None:
        return line
    return f"{line}, goodput {100 * fraction:.1f} %"


def starts_of(ledger: Sequence[Record]) -> list[RunStart]:
    """Return every start of the ranks that the ledger records, oldest first."""
    start_indexes = [index for index, event in enumerate(ledger) if event["event"] in STARTS]
    starts = []
    for index, next_index in zip(start_indexes, [*start_indexes[1:], len(ledger)]):
        event = ledger[index]
        later_events = _events_of_start(ledger, index, next_index)
        progress = [e for e in later_events if e["event"] in _PROGRESS_EVENTS]
        newest = progress[-1] if progress else event
        setup = event.get("setup_s", {})
        starts.append(
            RunStart(
                began=_time(event) - sum(setup.values()),
                setup=setup,
                first_step=event["step"],
                repeated=event.get("repeated", 0),
                last=max(_time(e) for e in [event, *later_events]),
                last_step=newest["step"],
                spent=newest["spent_s"] if "spent_s" in newest else _estimated_spent_s(event, progress),
            )
        )
    return starts


def _events_of_start(ledger: Sequence[Record], index: int, next_index: int) -> list[Record]:
    """Return the events after the start event at `index` and before that at `next_index`.

    Events that an older attempt, cut off and given up, wrote late are left out.
    """
    attempt = ledger[index].get("attempt")
    return [event for event in ledger[index + 1 : next_index] if event.get("attempt", attempt) == attempt]


def _estimated_spent_s(start: Record, progress: Sequence[Record]) -> dict[str, float]:
    """Estimate the seconds of a start that no event records: stalls as recorded, all other time as steps."""
    if not progress:
        return {}
    stall = sum(event.get("stall_s", 0.0) + event.get("wait_s", 0.0) for event in progress)
    return {"step": max(0.0, _time(progress[-1]) - _time(start) - stall), "stall": stall}


def seconds_per_step(starts: Sequence[RunStart]) -> float:
    """Return the mean seconds of a step over all starts, without compilation and waits; 0 before the first step."""
    steps = sum(start.num_steps for start in starts)
    return sum(start.steps_s for start in starts) / steps if steps else 0.0


def _queue_and_boot(
    ledger: Sequence[Record], jobs: Sequence[Record], number: int, starts: Sequence[RunStart]
) -> tuple[float, float]:
    """Return the seconds before a start that its Slurm jobs waited for nodes, and that they took to start the process.

    Several jobs may begin before a start, if all but the last ended before they started the ranks.

    Args:
        number: index of the start in `starts`.
    """
    start_indexes = [index for index, event in enumerate(ledger) if event["event"] in STARTS]
    own_index = start_indexes[number]
    if number == 0:
        previous_index = -1
        waiting_since = -math.inf
    else:
        previous_index = start_indexes[number - 1]
        waiting_since = starts[number - 1].last
    begins = [job for job in jobs if job["event"] == "begin" and previous_index < job["ledger_events"] <= own_index]
    queue_s = 0.0
    boot_s = 0.0
    for job in begins:
        started = _seconds(job.get("started")) or _time(job)
        submitted = _seconds(job.get("submitted")) or started
        queue_s += max(0.0, started - max(waiting_since, submitted))
        boot_s = max(0.0, starts[number].began - started)  # only the last job started the process
        waiting_since = _time(job)
    return queue_s, boot_s


def _first_submission(jobs: Sequence[Record]) -> float:
    """Return the Unix time at which the first job was submitted; infinity if none is known."""
    times = [_seconds(job.get("submitted")) for job in jobs if job["event"] == "begin"]
    return min((t for t in times if t is not None), default=math.inf)


def _total(starts: Sequence[RunStart], field: str, part: str) -> float:
    """Return the sum over all starts of one part of `setup` or `spent`, in seconds."""
    return math.fsum(getattr(start, field).get(part, 0.0) for start in starts)


def _time(event: Record) -> float:
    """Return the time of an event in Unix seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds(time: str | None) -> float | None:
    """Return an ISO 8601 time in Unix seconds; None stays None."""
    return None if time is None else datetime.fromisoformat(time).timestamp()
