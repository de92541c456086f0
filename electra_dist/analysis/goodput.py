"""Split the wall-clock time of a run into parts, and compute its goodput, from the run's ledger.

Guarantee: pure functions of the events in ledger.jsonl and of the job records in slurm/jobs.jsonl, which show the time
before a process starts. The parts below, in seconds, add up to the wall-clock time from the first submission (without
Slurm: from the start of the first process) to the last event.

    queue    waiting for nodes: from submitted (or requeued) to started
    boot     from the start of the job to the start of the rank's process: batch script, srun, deepspeed
    imports, build, restore    from the start of the process to the first step (`setup_s` of start and resume events)
    compile  the time by which the first step took longer than the mean of the others
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

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from electra_dist.run.jsonl import Record
from electra_dist.run.number_formats import format_duration

STARTS = ("start", "resume")
_PROGRESS_EVENTS = ("checkpoint", "stop", "storage", "done", "crash", "unhealthy", "rollback")  # they hold `spent_s`


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Account of a run's wall-clock time: the seconds that were spent on each activity.

    The fields `queue` to `down` do not overlap, and add up to the time from the first Slurm submission to the last
    event of the ledger. Without Slurm the account begins with the first process. `useful` are steps that were kept,
    `lost` are steps that were repeated after a restart, and `down` is all time that no other field covers.
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
        outside_queue_s = self.wall - self.queue
        if outside_queue_s <= 0:
            return None
        return self.useful / outside_queue_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of each activity by its name, from "queue" to "down", in the order of the fields."""
        activities = [field.name for field in fields(self) if field.name not in ("steps_lost", "starts")]
        return {activity: getattr(self, activity) for activity in activities}

    def described(self) -> str:
        """Return one line of text: activities of at least half a second, the number of starts, and the steps lost.

        For example, "queue 2m00s, useful 3h05m; 2 starts, 40 steps lost".
        """
        parts = [f"{name} {format_duration(seconds)}" for name, seconds in self.parts().items() if seconds >= 0.5]
        return f"{', '.join(parts)}; {self.starts} starts, {self.steps_lost:,} steps lost"


@dataclass(frozen=True)
class RunStart:
    """One start of a run's ranks, from the launch of their processes to their end, as ledger.jsonl records it.

    It holds when the start began and ended, and how many seconds it spent on each activity. Points in time are Unix
    seconds.
    """

    began: float  # start of the process
    setup: Mapping[str, float]  # seconds by activity: import, build, restore
    first_step: int  # steps that were done when it began
    repeated: int  # steps of earlier starts that this one repeats
    last: float  # time of its last event
    last_step: int  # steps that were done when `spent` was recorded
    spent: Mapping[str, float]  # seconds by activity: first (the first step), step (the others), data, stall, eval

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps this start made until its times (`spent`) were last recorded.

        Steps after its newest ledger event are therefore not included.
        """
        return max(0, self.last_step - self.first_step)

    @property
    def compile_s(self) -> float:
        """Return the estimated seconds of compilation: how much longer the first step was than the mean of the others.

        0 if the ledger covers fewer than two steps of this start.
        """
        num_other_steps = self.num_steps - 1
        if num_other_steps <= 0:
            return 0.0
        first_step_s = self.spent.get("first", 0.0)
        mean_other_step_s = self.spent.get("step", 0.0) / num_other_steps
        return max(0.0, first_step_s - mean_other_step_s)

    @property
    def steps_s(self) -> float:
        """Return the seconds of all steps of this start, without compilation and without waiting for rows.

        If the first step took longer than the mean of the others, the difference is `compile_s` and not in the result.
        """
        all_steps_s = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        data_s = self.spent.get("data", 0.0)
        return max(0.0, all_steps_s - data_s - self.compile_s)


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
    queue_and_boot_s = _queue_and_boot_of_starts(ledger, jobs, starts)
    useful_s, lost_s, steps_lost = _useful_and_lost(starts)
    setups = [start.setup for start in starts]
    spent = [start.spent for start in starts]
    parts = {
        "queue": sum(queue_s for queue_s, _ in queue_and_boot_s),
        "boot": sum(boot_s for _, boot_s in queue_and_boot_s),
        "imports": _total(setups, "import"),
        "build": _total(setups, "build"),
        "restore": _total(setups, "restore"),
        "compile": sum(start.compile_s for start in starts),
        "data": _total(spent, "data"),
        "stall": _total(spent, "stall"),
        "eval": _total(spent, "eval"),
        "lost": lost_s,
        "useful": useful_s,
    }
    run_began = min(starts[0].began, _first_submission(jobs))
    wall_s = starts[-1].last - run_began
    down_s = max(0.0, wall_s - math.fsum(parts.values()))
    return Goodput(**parts, down=down_s, steps_lost=steps_lost, starts=len(starts))


def _useful_and_lost(starts: Sequence[RunStart]) -> tuple[float, float, int]:
    """Return (seconds of kept steps, seconds of steps that were repeated later, number of repeated steps).

    A step is kept if the next start of the ranks resumed from a checkpoint that contains it. The steps of the last
    start are all kept. For example, if a start makes 120 steps and is killed, and the next one resumes at step 100,
    then 100 steps are kept and 20 are repeated. The time of steps that a killed start made after its last ledger event
    is estimated from the mean step time.

    Args:
        starts: all starts of the run, oldest first.
    """
    mean_step_s = seconds_per_step(starts)
    useful_s = 0.0
    lost_s = 0.0
    steps_lost = 0
    for start, next_start in itertools.zip_longest(starts, starts[1:]):
        step_s = mean_step_s  # for a start that was killed before it recorded a step
        if start.num_steps:
            step_s = start.steps_s / start.num_steps
        if next_start is None:
            useful_s += start.num_steps * step_s
            break

        # Steps that the ledger records: those up to the checkpoint from which the next start resumed are kept.
        num_kept = min(start.num_steps, max(0, next_start.first_step - start.first_step))
        num_repeated = start.num_steps - num_kept
        useful_s += num_kept * step_s
        lost_s += num_repeated * step_s

        # Steps between the last event of this start and its end: only the next start knows how many they were. Their
        # time is estimated, and is no longer than the gap between the two starts.
        num_unrecorded = max(0, next_start.repeated - num_repeated)
        gap_s = max(0.0, next_start.began - start.last)
        lost_s += min(num_unrecorded * step_s, gap_s)
        steps_lost += max(next_start.repeated, num_repeated)
    return useful_s, lost_s, steps_lost


def start_line(ledger: Sequence[Record], jobs: Sequence[Record] = ()) -> str:
    """Return the line that a start of the ranks prints: its step, the checkpoint's age, steps lost, and goodput.

    For example, "restored step 1,000, age 5m00s, 20 steps lost, goodput 93.1 %". Steps lost are those that the run
    made after the restored checkpoint and must repeat. The first start of a run prints its step only, for example
    "start at step 0".

    Args:
        ledger: events up to the event "start" or "resume" of this start; that event must be included.
        jobs: records of slurm/jobs.jsonl; empty without Slurm.
    """
    start_events = [event for event in ledger if event["event"] in STARTS]
    newest_start = start_events[-1]
    parts = []
    if newest_start["event"] == "resume":
        parts.append(f"restored step {newest_start['step']:,}")
        age_s = _checkpoint_age_s(ledger, newest_start)
        if age_s is not None:
            parts.append(f"age {format_duration(age_s)}")
    else:
        parts.append(f"start at step {newest_start['step']:,}")
    if len(start_events) > 1:
        parts.append(f"{newest_start.get('repeated', 0):,} steps lost")
        fraction = goodput(ledger, jobs).fraction
        if fraction is not None:
            parts.append(f"goodput {100 * fraction:.1f} %")
    return ", ".join(parts)


def _checkpoint_age_s(ledger: Sequence[Record], resume: Record) -> float | None:
    """Return the seconds from the save of a checkpoint to a resume from it; None if the ledger lacks the save.

    Args:
        ledger: events of ledger.jsonl, oldest first.
        resume: the resume event; its step is that of the checkpoint.
    """
    saves = [event for event in ledger if event["event"] == "checkpoint" and event["step"] == resume["step"]]
    if not saves:
        return None
    return _time(resume) - _time(saves[-1])


def starts_of(ledger: Sequence[Record]) -> list[RunStart]:
    """Return every start of the ranks that the ledger records, oldest first.

    Each start has a number, the attempt, which its events contain. A start consists of an event "start" or "resume"
    and of the events with the same attempt up to the next event "start" or "resume".

    Args:
        ledger: events of ledger.jsonl, oldest first.
    """
    start_indexes = _start_indexes(ledger)
    end_indexes = [*start_indexes[1:], len(ledger)]  # exclusive
    return [
        _run_start(ledger[index], _events_of_start(ledger, index, end_index))
        for index, end_index in zip(start_indexes, end_indexes)
    ]


def _run_start(start_event: Record, later_events: Sequence[Record]) -> RunStart:
    """Summarise the ledger's events of one start of the ranks (one launch of their processes) in a `RunStart`.

    The first event is written after the setup (import, build, restore), so the processes began earlier than its time
    by the seconds of the setup that it records.

    Args:
        start_event: its event "start" or "resume", which is written after the setup.
        later_events: its other events, oldest first; may be empty.
    """
    progress = [event for event in later_events if event["event"] in _PROGRESS_EVENTS]
    newest_progress = progress[-1] if progress else start_event
    setup = start_event.get("setup_s", {})
    return RunStart(
        began=_time(start_event) - sum(setup.values()),
        setup=setup,
        first_step=start_event["step"],
        repeated=start_event.get("repeated", 0),
        last=max(_time(event) for event in [start_event, *later_events]),
        last_step=newest_progress["step"],
        spent=_spent_s(start_event, progress),
    )


def _start_indexes(ledger: Sequence[Record]) -> list[int]:
    """Return the indexes in `ledger` of the events "start" and "resume"; each of them begins a start of the ranks."""
    return [index for index, event in enumerate(ledger) if event["event"] in STARTS]


def _events_of_start(ledger: Sequence[Record], index: int, next_index: int) -> list[Record]:
    """Return the ledger events of one start of the ranks, without the event "start" or "resume" that begins it.

    Each start has a number, its attempt. Events with the number of another attempt are left out: an earlier start that
    was cut off from the network may write them late.

    Args:
        ledger: all events, oldest first.
        index: index in `ledger` of the event that begins this start.
        next_index: index of the event that begins the next start, or the length of `ledger`.
    """
    attempt = ledger[index].get("attempt")
    return [event for event in ledger[index + 1 : next_index] if event.get("attempt", attempt) == attempt]


def _spent_s(start_event: Record, progress: Sequence[Record]) -> Mapping[str, float]:
    """Return the seconds that one start of the ranks (one launch of their processes) spent on each activity.

    The activities are steps, pauses for checkpoints ("stall"), evaluations and so on.

    If the newest event has the field `spent_s`, which counts the seconds by activity since that start, the field is
    returned. Older ledgers lack the field, and the seconds are then estimated from all events of the start. "stall" is
    the sum of the pauses for checkpoints that they record, and "step" is all other time between the start event and
    the newest one. If there is no event after the start event, the result is empty.

    Args:
        start_event: the ledger's event "start" or "resume", written when the ranks were started.
        progress: the later events of the same start that record how many steps are done, such as "checkpoint", oldest
            first; may be empty.
    """
    newest = progress[-1] if progress else start_event
    if "spent_s" in newest:
        return newest["spent_s"]
    if not progress:
        return {}
    stall_s = sum(event.get("stall_s", 0.0) + event.get("wait_s", 0.0) for event in progress)
    steps_s = max(0.0, _time(newest) - _time(start_event) - stall_s)
    return {"step": steps_s, "stall": stall_s}


def seconds_per_step(starts: Sequence[RunStart]) -> float:
    """Return the mean seconds of a step over all steps of all starts; 0 before the first step.

    Compilation in the first step of a start, waiting for rows, checkpoints and evaluations are not included.

    Args:
        starts: the starts of a run's ranks, see `starts_of`.
    """
    num_steps = sum(start.num_steps for start in starts)
    if num_steps == 0:
        return 0.0
    return sum(start.steps_s for start in starts) / num_steps


def _queue_and_boot_of_starts(
    ledger: Sequence[Record], jobs: Sequence[Record], starts: Sequence[RunStart]
) -> list[tuple[float, float]]:
    """Return, for each start of the ranks, the seconds that it waited for nodes and then booted: (queue, boot).

    Each job's "begin" record in jobs.jsonl holds the number of events that the ledger had when the job began. The job
    led to the first start whose start event was written to the ledger after those events. For example, a job that
    began when the ledger had 7 events led to the start whose event is the next "start" or "resume" from index 7 on.

    Args:
        ledger: events of ledger.jsonl, oldest first.
        jobs: records of slurm/jobs.jsonl, oldest first.
        starts: all starts of the ledger, see `starts_of`.
    """
    begins = [job for job in jobs if job["event"] == "begin"]
    queue_and_boot_s = []
    previous_index = -1
    previous_end = -math.inf
    for start, index in zip(starts, _start_indexes(ledger)):
        own_begins = [job for job in begins if previous_index < job["ledger_events"] <= index]
        queue_and_boot_s.append(_queue_and_boot(own_begins, previous_end, start.began))
        previous_index = index
        previous_end = start.last
    return queue_and_boot_s


def _queue_and_boot(begins: Sequence[Record], previous_end: float, process_began: float) -> tuple[float, float]:
    """Return how long one start of the ranks waited for nodes, and how long it then booted: (queue, boot) in seconds.

    Usually one Slurm job leads to one start of the ranks: `queue` is the time from its submission until Slurm starts
    it, and `boot` is the time from then until the Python process begins. Several jobs come before one start if the
    earlier ones ended before their ranks started. `queue` is then the sum over these jobs, and `boot` is that of the
    last job.

    Args:
        begins: "begin" records of these jobs in slurm/jobs.jsonl, oldest first; without any the result is (0, 0).
        previous_end: Unix time of the last event of the previous start, before which no waiting is counted; -infinity
            for the first start.
        process_began: Unix time at which the Python process of this start began.
    """
    queue_s = 0.0
    boot_s = 0.0
    busy_until = previous_end  # until then the run was not waiting, even if the next job was in the queue already
    for job in begins:
        recorded = _time(job)  # the job's script writes the record as its first act, so the job has its nodes by then
        started = _seconds(job.get("started"))
        if not started:  # Slurm did not report the time
            started = recorded
        submitted = _seconds(job.get("submitted"))
        if not submitted:  # Slurm did not report the time, so no waiting is counted
            submitted = started
        waiting_since = max(submitted, busy_until)
        queue_s += max(0.0, started - waiting_since)
        boot_s = max(0.0, process_began - started)  # replaced by each later job: only the last started the process
        busy_until = recorded  # the run held the nodes of this job, so the wait for the next one began later
    return queue_s, boot_s


def _first_submission(jobs: Sequence[Record]) -> float:
    """Return the Unix time at which the first Slurm job of the run was submitted; infinity if no record has that time.

    Args:
        jobs: records of slurm/jobs.jsonl; those of the kind "begin" hold the time of submission.
    """
    submissions = [_seconds(job.get("submitted")) for job in jobs if job["event"] == "begin"]
    known_submissions = [submitted for submitted in submissions if submitted is not None]
    return min(known_submissions, default=math.inf)


def _total(seconds_by_activity: Iterable[Mapping[str, float]], activity: str) -> float:
    """Return the seconds that all starts of a run together spent on one activity.

    Args:
        seconds_by_activity: for each start, its seconds by activity.
        activity: for example "import"; a start without it counts as 0.
    """
    return math.fsum(seconds.get(activity, 0.0) for seconds in seconds_by_activity)


def _time(event: Record) -> float:
    """Return the time at which a ledger event or a job record was written, in Unix seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds(time: str | None) -> float | None:
    """Convert an ISO 8601 time to Unix seconds; return None if the time is None, which means not recorded."""
    return None if time is None else datetime.fromisoformat(time).timestamp()
