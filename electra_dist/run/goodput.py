"""Split the wall-clock time of a run into parts, and compute its goodput, from the run's ledger.

Guarantee: pure functions of the events in ledger.jsonl and of the job records in slurm/jobs.jsonl, which show the time
before a process starts. The parts below, in seconds, add up to the wall-clock time from the first submission (without
Slurm: from the start of the first process) to the last event. Only if the other parts alone exceed that time, for
example because a clock was set back, do they add up to more; `down` is then 0.

    queue    waiting for nodes: from the submission of the job (or its requeue) until it began
    boot     from when the job began to the start of the rank's process: batch script, srun, deepspeed
    imports, build, restore    from the start of the process to the first step (`setup_s` of start and resume events)
    compile  the time by which the first step took longer than the mean of the others
    data     waiting for rows
    stall    checkpoint copies, and waits for the previous one
    eval     held-out evaluations
    lost     steps that were repeated later
    useful   steps that were kept
    down     everything not listed above: a fault until it is noticed, killing processes, reports

Goodput is useful / (wall - queue). The run cannot influence the time in the queue.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from electra_dist.run.history import Link, Start, links, seconds_per_step, starts
from electra_dist.run.ledger import JobRecord, LedgerEvent
from electra_dist.run.number_formats import format_duration


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of a run's wall-clock time by activity; goodput is the share in which it made steps that it has kept."""

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
    starts: int = 0  # starts of the run, the first included

    @property
    def wall(self) -> float:
        """Return the wall-clock seconds of the run: the sum of the fields `queue` to `down`."""
        return math.fsum(self.parts().values())

    @property
    def fraction(self) -> float | None:
        """Return the goodput, in [0, 1], or None if the run has spent no time outside Slurm's queue yet."""
        outside_queue_s = self.wall - self.queue
        if outside_queue_s <= 0:
            return None
        return self.useful / outside_queue_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of each activity by its name, in the order of the fields."""
        activities = [field.name for field in fields(self) if field.name not in ("steps_lost", "starts")]
        return {activity: getattr(self, activity) for activity in activities}

    def described(self) -> str:
        """Return one line, such as "queue 2m00s, useful 3h05m; 2 starts, 40 steps repeated"."""
        parts = [f"{name} {format_duration(seconds)}" for name, seconds in self.parts().items() if seconds >= 0.5]
        starts = "1 start" if self.starts == 1 else f"{self.starts:,} starts"
        return f"{', '.join(parts)}; {starts}, {self.steps_lost:,} steps repeated"


def goodput(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord] = ()) -> Goodput:
    """Split the wall-clock time of a run, up to its last event, by activity.

    A start of a finished run that has trained nothing does not count, nor does the pause before it.
    Without `jobs` (slurm/jobs.jsonl), `queue` and `boot` are 0 and the time between two starts counts as `down`.
    """
    run_starts = _starts_that_train(starts(ledger))
    if not run_starts:
        return Goodput()
    job_links = links(jobs)
    queue_and_boot_s = _queue_and_boot_of_starts(run_starts, job_links)
    step_times = _step_times(run_starts)
    setups = [start.setup for start in run_starts]
    spent = [start.spent for start in run_starts]
    parts = {
        "queue": sum(queue_s for queue_s, _ in queue_and_boot_s),
        "boot": sum(boot_s for _, boot_s in queue_and_boot_s),
        "imports": _total(setups, "import"),
        "build": _total(setups, "build"),
        "restore": _total(setups, "restore"),
        "compile": sum(start.compile_s for start in run_starts),
        "data": _total(spent, "data"),
        "stall": _total(spent, "stall"),
        "eval": _total(spent, "eval"),
        "lost": step_times.lost_s,
        "useful": step_times.useful_s,
    }
    first_submission = min((link.submitted_and_began[0] for link in job_links), default=math.inf)
    wall_s = run_starts[-1].last - min(run_starts[0].began, first_submission)
    down_s = max(0.0, wall_s - math.fsum(parts.values()))
    return Goodput(**parts, down=down_s, steps_lost=step_times.num_lost, starts=len(run_starts))


def _starts_that_train(run_starts: Sequence[Start]) -> list[Start]:
    """Leave out the starts of a finished run that had nothing to train: the run's time ended before them."""
    kept: list[Start] = []
    for start in run_starts:
        was_finished = bool(kept) and kept[-1].ended_by == "done"
        if start.num_steps or not was_finished:
            kept.append(start)
    return kept


def _queue_and_boot_of_starts(starts: Sequence[Start], links: Sequence[Link]) -> list[tuple[float, float]]:
    """Return, for each start of the run, its seconds in Slurm's queue and its seconds to boot.

    Booting is the time from the begin of the job to the start of the process.
    """
    queue_and_boot_s = []
    previous_index = -1
    previous_end = -math.inf
    for start in starts:
        # A job led to the first start event after the number of events that the ledger had when it began.
        own_links = [link for link in links if previous_index < link.begin.ledger_events <= start.index]
        queue_and_boot_s.append(_queue_and_boot(own_links, previous_end, start.began))
        previous_index = start.index
        previous_end = start.last
    return queue_and_boot_s


def _queue_and_boot(links: Sequence[Link], previous_end: float, process_began: float) -> tuple[float, float]:
    """Return the seconds in Slurm's queue and the seconds to boot of one start of the run.

    `links` are the jobs that led to this start. Their seconds in the queue are added up. Booting lasts from the begin
    of the last job to `process_began`. The start before ended at `previous_end`. Both are Unix seconds.
    """
    queue_s = 0.0
    boot_s = 0.0
    busy_until = previous_end  # until then the run was not waiting, even if the next job was in the queue already
    for link in links:
        submitted, job_began = link.submitted_and_began
        waiting_since = max(submitted, busy_until)
        queue_s += max(0.0, job_began - waiting_since)
        boot_s = max(0.0, process_began - job_began)  # replaced by each later job: only the last started the process
        busy_until = link.begin.unix_s  # the run held the nodes of this job, so the wait for the next one began later
    return queue_s, boot_s


class _StepTimes(NamedTuple):
    """Seconds of the steps that a run has kept, and seconds and number of those that it repeated later."""

    useful_s: float
    lost_s: float
    num_lost: int


def _step_times(starts: Sequence[Start]) -> _StepTimes:
    """Add up the seconds of all steps of all starts.

    A step is kept if the next start resumed from a checkpoint that contains the step, or if no start followed.
    """
    mean_step_s = seconds_per_step(starts)
    useful_s = 0.0
    lost_s = 0.0
    num_lost = 0
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

        # Steps between the last record of its seconds and the end of this start: only the next start knows how many
        # they were. Their time is estimated, and is no longer than the gap from that record to the next start.
        num_unrecorded = max(0, next_start.repeated - num_repeated)
        gap_s = max(0.0, next_start.began - start.newest.unix_s)
        lost_s += min(num_unrecorded * step_s, gap_s)
        num_lost += max(next_start.repeated, num_repeated)
    return _StepTimes(useful_s, lost_s, num_lost)


def _total(seconds_by_activity: Iterable[Mapping[str, float]], activity: str) -> float:
    return math.fsum(seconds.get(activity, 0.0) for seconds in seconds_by_activity)


def start_line(ledger: Sequence[LedgerEvent], jobs: Sequence[JobRecord] = ()) -> str:
    """Describe a run's newest start in `ledger`: restored step, age of the checkpoint, repeated steps, goodput."""
    run_starts = starts(ledger)
    first_event = run_starts[-1].events[0]
    parts = []
    if first_event.event == "resume":
        parts.append(f"restored step {first_event.step:,}")
        saves = [event for event in ledger if event.event == "checkpoint" and event.step == first_event.step]
        if saves:
            parts.append(f"age {format_duration(first_event.unix_s - saves[-1].unix_s)}")
    else:
        parts.append(f"start at step {first_event.step:,}")
    if len(run_starts) > 1:
        parts.append(f"{first_event.repeated:,} later steps are repeated")
        fraction = goodput(ledger, jobs).fraction
        if fraction is not None:
            parts.append(f"goodput {100 * fraction:.1f} %")
    return ", ".join(parts)
