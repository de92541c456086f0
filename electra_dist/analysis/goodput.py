"""Split the wall-clock time of a run into parts, and compute its goodput, from the run's ledger.

Guarantee: pure functions of the events in ledger.jsonl and of the job records in slurm/jobs.jsonl, which show the time
before a process starts. The parts below, in seconds, add up to the wall-clock time from the first submission (without
Slurm: from the start of the first process) to the last event.

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

Goodput is useful / (wall - queue). The run cannot influence the time in the queue, which is therefore shown
separately.

Limits: if events have no `spent_s` (the seconds by activity; missing in an older ledger, and for a start that was
killed before its first checkpoint), the seconds are estimated from the times of the events. The seconds after the last
event are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from electra_dist.run.jsonl import Record
from electra_dist.run.number_formats import format_duration

STARTS = ("start", "resume")
_PROGRESS_EVENTS = ("checkpoint", "stop", "done", "crash", "unhealthy", "rollback")  # they hold `spent_s`


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Account of a run's wall-clock time: the seconds that were spent on each activity.

    The fields `queue` to `down` add up to the time from the first submission to the last event. The docstring of this
    module defines each of them.
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
        """Return the wall-clock seconds of the run: the sum of the fields `queue` to `down`."""
        return math.fsum(self.parts().values())

    @property
    def fraction(self) -> float | None:
        """Return the goodput, in [0, 1]: the seconds of useful steps divided by all seconds outside the queue.

        None if the run has spent no time outside the queue yet.
        """
        outside_queue = self.wall - self.queue
        return self.useful / outside_queue if outside_queue > 0 else None

    def parts(self) -> dict[str, float]:
        """Return the seconds of each activity by its name, from "queue" to "down", in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("steps_lost", "starts")}

    def described(self) -> str:
        """Return one line of text: activities of at least half a second, the number of starts, and the steps lost."""
        parts = [f"{name} {format_duration(seconds)}" for name, seconds in self.parts().items() if seconds >= 0.5]
        return f"{', '.join(parts)}; {self.starts} starts, {self.steps_lost:,} steps lost"


@dataclass(frozen=True)
class RunStart:
    """One start of a run's ranks, as the ledger records it: when it began and ended, and how its seconds were spent.

    Points in time are Unix seconds.
    """

    began: float  # start of the process
    setup: Mapping[str, float]  # seconds by part: import, build, restore
    first_step: int  # steps that were done when it began
    repeated: int  # steps of earlier starts that this one repeats
    last: float  # time of its last event
    last_step: int  # steps that were done when `spent` was recorded
    spent: Mapping[str, float]  # seconds by part: first step, other steps, data, stall, eval

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps whose seconds `spent` contains."""
        return max(0, self.last_step - self.first_step)

    @property
    def compile_s(self) -> float:
        """Return the estimated seconds of compilation: how much longer the first step was than the mean of the others.

        0 if the ledger covers fewer than two steps of this start.
        """
        num_others = self.num_steps - 1
        if num_others <= 0:
            return 0.0
        first_s = self.spent.get("first", 0.0)
        return max(0.0, first_s - self.spent.get("step", 0.0) / num_others)

    @property
    def steps_s(self) -> float:
        """Return the seconds of all steps of this start, without compilation and without waiting for rows."""
        all_steps_s = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        return max(0.0, all_steps_s - self.spent.get("data", 0.0) - self.compile_s)


def goodput(ledger: Sequence[Record], jobs: Sequence[Record] = ()) -> Goodput:
    """Split the wall-clock time of a run, up to its last event, by the activities on which it was spent.

    Args:
        ledger: events of ledger.jsonl, oldest first. If it has no start, all numbers of the result are 0.
        jobs: records of slurm/jobs.jsonl; without them `queue` and `boot` are 0, and the time between two starts
            counts as `down`.
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
    """Return (seconds of kept steps, seconds of steps that were repeated later, number of repeated steps).

    A step is kept if the next start of the ranks resumed from a checkpoint that contains it. The steps of the last
    start are all kept.
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
    """Return the line that a start of the ranks prints: its step, the checkpoint's age, steps lost, and goodput.

    Args:
        ledger: events up to the start or resume event of this start; that event must be included.
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
    """Return the events of one start of the ranks, without its start event.

    Events with the number of another attempt are left out: an earlier start that was cut off from the network may
    write them late.

    Args:
        ledger: all events, oldest first.
        index: index of the start event in `ledger`.
        next_index: index of the next start event, or the length of `ledger`.
    """
    attempt = ledger[index].get("attempt")
    return [event for event in ledger[index + 1 : next_index] if event.get("attempt", attempt) == attempt]


def _estimated_spent_s(start: Record, progress: Sequence[Record]) -> dict[str, float]:
    """Estimate how a start spent its seconds if its events do not record that: stalls as recorded, the rest as steps.

    Args:
        start: the start event.
        progress: the later events of this start that record steps, such as checkpoints; without any, the result is
            empty.
    """
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
    """Return (queue, boot) of one start of the ranks, in seconds.

    `queue` is how long its Slurm jobs waited for nodes; `boot` is the time from the last job's start to the process.
    Several Slurm jobs may begin before one start, if all but the last ended before they started the ranks.

    Args:
        ledger: events of ledger.jsonl, oldest first.
        jobs: records of slurm/jobs.jsonl, oldest first.
        number: index of the start in `starts`.
        starts: all starts of the ledger, see `starts_of`.
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
    """Return the seconds that all starts together spent on one activity.

    Args:
        starts: the starts to add up.
        field: "setup" or "spent", the mapping of `RunStart` that has the activity.
        part: name of the activity, for example "import"; a start without it counts as 0.
    """
    return math.fsum(getattr(start, field).get(part, 0.0) for start in starts)


def _time(event: Record) -> float:
    """Return the time of a ledger event or job record in Unix seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds(time: str | None) -> float | None:
    """Convert an ISO 8601 time to Unix seconds; None stays None."""
    return None if time is None else datetime.fromisoformat(time).timestamp()
