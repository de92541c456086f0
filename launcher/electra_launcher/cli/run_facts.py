"""Find out where a run stands, and the command to run next, as the JSON object of `electra-dist status RUN --json`.

Guarantee: it only reads, and changes neither the run nor Slurm's queue. `gather` reads the run folder and asks Slurm,
and `facts` makes the object.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from electra_dist.config import ClusterConfig, Config
from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.run.environment_record import read_environment
from electra_dist.run.failures import (
    Failure,
    Strike,
    excluded_nodes,
    newest_failure,
    read_failures,
    read_strikes,
    since_newest_start,
)
from electra_dist.run.folder import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    SLURM_DIR,
    STOP_FILE,
    has_records_of_run,
    no_run,
    override_of_moved_run,
    supervise_log,
)
from electra_dist.run.goodput import Goodput, goodput
from electra_dist.run.heartbeat import Beat, Hung, hung, read_heartbeats, storage_limit_s
from electra_dist.run.history import (
    ENDINGS,
    STARTS,
    Link,
    RunEvidence,
    State,
    links,
    run_state,
    since_submission,
    starts,
)
from electra_dist.run.lease import HeldLease, read_owner
from electra_dist.run.ledger import JobEnded, JobRecord, JobSubmitted, LedgerEvent, read_jobs, read_ledger
from electra_dist.run.metrics import EvalRecord, StepRecord, newest_metrics
from electra_dist.run.number_formats import format_duration
from electra_dist.store.atomic_files import disk_problem, read_regular
from electra_launcher.slurm.slurm import QueuedJob, QueueView, job_name, queue_view

_STEPS_OF_PATIENCE = 10  # step times for which a living run may be silent, because a step may take longer than usual
# Slurm's reason for which a job waits -> what it means for a run.
_MEANING_OF_REASON = {
    "Dependency": "the job before it has not ended",
    "BeginTime": "its begin time has not come: after a requeue, or ten minutes after storage stayed away",
    "Resources": "no free nodes",
    "Priority": "other jobs come first",
    "ReqNodeNotAvail": "nodes that it needs are out of service or reserved",
    "PartitionTimeLimit": "--time is longer than the partition allows",
    "AssocGrpCpuLimit": "the account's limit is used up",
    "PartitionDown": "the partition is down",
}


# What is read
@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A run at one moment, as its files and Slurm's queue show it."""

    run: Path  # the run folder
    disk_problem: str  # why the disk of the run folder takes no bytes; empty if it takes some
    now: float  # Unix time
    config: Config
    ledger: list[LedgerEvent]
    jobs: list[JobRecord]  # the lines of slurm/jobs.jsonl
    last: StepRecord | None  # newest record of a training step; None before the first
    last_eval: EvalRecord | None  # newest record of an evaluation; None before the first
    metrics_written: float | None  # Unix time of the newest metrics record; None before the first
    beats: list[Beat]  # last heartbeat of each rank
    strikes: list[Strike]
    failures: list[Failure]  # why starts of the ranks have failed, as their supervisors have found out
    queue: QueueView | None  # None if squeue is missing or fails, or if the run was never submitted
    submitted_by: str  # command line of the newest submission; empty if there was none
    ranks_of_hosts: dict[str, int]  # ranks of the last start on each host; empty before the first start
    owner: HeldLease | None  # who holds the run folder's lease; None: nobody

    @cached_property
    def state(self) -> State:
        """Return the state of the run: living, finished, stopped, dead, held, waiting or not begun (`run_state`)."""
        times = [*(beat.time for beat in self.beats), *(event.unix_s for event in self.ledger[-1:])]
        if self.metrics_written is not None:
            times.append(self.metrics_written)
        evidence = RunEvidence(
            now=self.now,
            sign_of_life=max(times, default=None),
            patience_s=self._longest_silence_s(),
            running=any(job.state == "RUNNING" for job in self.queued_jobs),
            pending=any(job.state in ("PENDING", "COMPLETING") and not job.is_held for job in self.queued_jobs),
            held=any(job.is_held for job in self.queued_jobs),
            owner_has_ended=self.owner is not None and self.owner.owner_has_ended,
            is_starting=self._is_starting(),
        )
        return run_state(self.ledger, evidence)

    def _is_starting(self) -> bool:
        """Return whether a start lives that has taken the lease and has recorded no event yet."""
        if self.owner is None or not self.owner.is_living(self.now):
            return False
        return not self.ledger or self.ledger[-1].unix_s < self.owner.owner.since

    def _longest_silence_s(self) -> float:
        """Return how many seconds a run may write no heartbeat, metrics or event before it counts as dead."""
        cluster = self.config.cluster
        if self.disk_problem or any(beat.phase == "storage" for beat in self.beats):
            return max(cluster.hang_step_floor_s, storage_limit_s(cluster))
        newest_event = self.ledger[-1] if self.ledger else None
        if newest_event is not None and newest_event.event in STARTS:
            has_trained = any(beat.step > newest_event.step for beat in self.beats)
            if not has_trained:
                return cluster.hang_setup_s
        step_s = 0.0 if self.last is None else self.last.step_s
        num_silent_steps = max(_STEPS_OF_PATIENCE, self.config.log.every_steps)
        return max(cluster.hang_step_floor_s, step_s * num_silent_steps)

    @property
    def queued_jobs(self) -> tuple[QueuedJob, ...]:
        """Return the run's jobs in Slurm's queue; () if there is no Slurm or the run was never submitted."""
        return self.queue.jobs if self.queue else ()

    @property
    def queue_is_unknown(self) -> bool:
        """Return whether the run was submitted to Slurm but squeue gave no answer."""
        return bool(self.submitted_by) and self.queue is None

    @property
    def running_job_id(self) -> str:
        """Return the id of the run's job that Slurm reports as RUNNING, or "" if there is none."""
        return next((job.job for job in self.queued_jobs if job.state == "RUNNING"), "")

    @property
    def newest_checkpoint(self) -> LedgerEvent | None:
        """Return the newest event "checkpoint", or None; after a rollback, an earlier event may have a higher step."""
        checkpoints = [event for event in self.ledger if event.event == "checkpoint"]
        return checkpoints[-1] if checkpoints else None

    @property
    def newest_links(self) -> list[Link]:
        """Return the starts of the ranks by Slurm jobs since a person's newest submission."""
        return links(since_submission(self.jobs))

    @property
    def strike_expires_s(self) -> float:
        """Return after how many seconds a strike (recorded fault of a node) no longer counts."""
        return 3600 * self.config.cluster.strike_expires_h

    def age(self, event: LedgerEvent) -> str:
        """Return how long ago an event of the ledger was recorded, as text; "0s" if this node's clock is behind."""
        return format_duration(max(0.0, self.now - event.unix_s))


def gather(run: Path) -> Gathered:
    """Read a run folder's files and, for a submitted run, Slurm's queue; raise UserError if it is no run folder."""
    scripts = sorted(script for script in (run / SLURM_DIR).glob("submission-[0-9]*.sh") if script.is_file())
    newest_script = scripts[-1] if scripts else None
    config = load_config(_config_file(run, newest_script))
    newest = newest_metrics(run, with_evaluation=bool(config.data.heldout))
    metrics = run / METRICS_FILE
    return Gathered(
        run=run,
        disk_problem=disk_problem(run),
        now=time.time(),
        config=config,
        ledger=read_ledger(run),
        jobs=read_jobs(run),
        last=newest.step,
        last_eval=newest.evaluation,
        metrics_written=metrics.stat().st_mtime if metrics.exists() else None,
        beats=read_heartbeats(run),
        strikes=read_strikes(run),
        failures=read_failures(run),
        queue=queue_view(job_name(run.absolute())) if newest_script else None,
        submitted_by=_command_of(newest_script) if newest_script else "",
        ranks_of_hosts=read_environment(run).get("hosts", {}),
        owner=read_owner(run),
    )


def _command_of(script: Path) -> str:
    """Return the command line that has written a batch script, from the script's second line, a comment."""
    lines = read_regular(script).decode(errors="replace").splitlines()
    return lines[1].removeprefix("# ") if len(lines) > 1 else ""


def _config_file(run: Path, newest_script: Path | None) -> Path:
    """Return RUN/config.yaml or, before the first start writes it, the copy beside the newest batch script."""
    if (run / CONFIG_FILE).exists():
        return run / CONFIG_FILE
    if newest_script and newest_script.with_suffix(".yaml").exists():
        return newest_script.with_suffix(".yaml")
    if has_records_of_run(run):
        raise no_run(run)
    owner = read_owner(run)
    failure = newest_failure(since_newest_start(read_failures(run), (), owner))
    if failure is not None:
        raise UserError(
            f"{run}: the first start was refused before it recorded a config: {failure.description}: {failure.line}; "
            f"correct this and start again; more: electra-dist why {shlex.quote(str(run))}"
        )
    if owner is not None:
        raise UserError(
            f"{run}: the first start was killed before it recorded a config: {owner.owner.description}; start again"
        )
    raise no_run(run)


def first_start(run: Path) -> dict[str, Any] | None:
    """Return what `facts` returns, for a run whose first start goes on and has not written its config yet; else None.

    All that is not known so early is None in the result.
    """
    owner = read_owner(run)
    now = time.time()
    has_config = (run / CONFIG_FILE).exists() or (run / SLURM_DIR).exists()
    if has_config or owner is None or not owner.is_living(now):
        return None
    age = format_duration(max(0.0, now - owner.owner.since))
    log = supervise_log(run, 0)
    show = f"tail -f {shlex.quote(str(log))}" if log.exists() else f"electra-dist status {shlex.quote(str(run))}"
    unknown = (
        "last_event",
        "num_steps",
        "loss",
        "losses",
        "step_s",
        "eta_s",
        "checkpoint",
        "steps_to_repeat",
        "failure",
        "context_auc",
        "goodput",
    )
    empty = ("jobs", "links", "nodes_out", "silent_ranks", "waiting_for_storage", "excluded_nodes")
    return {
        **dict.fromkeys(unknown),
        **{name: [] for name in empty},
        "run": str(run),
        "state": "living",
        "reason": f"its first start began {age} ago, and has recorded no config yet",
        "step": 0,
        "owner": _owner(owner),
        "seconds": Goodput().parts(),
        "next": [show],
    }


# The JSON object
def facts(seen: Gathered) -> dict[str, Any]:
    """Return what is known of the run as a JSON object; unknown values are None.

    Keys that end in `_s`, and the values of "seconds", are durations in seconds. Events of the ledger keep their times
    in ISO 8601. "jobs" are the run's jobs in Slurm's queue. "links" are all starts of the run's ranks by Slurm jobs
    since the newest submission. "nodes_out" are nodes of the newest start that Slurm does not use.
    """
    is_living = seen.state == "living"
    account = goodput(seen.ledger, seen.jobs)
    last, evaluation, checkpoint = seen.last, seen.last_eval, seen.newest_checkpoint
    step = _newest_step(seen)
    starts_by_jobs = links(seen.jobs)
    newest_nodes = starts_by_jobs[-1].begin.nodes.split(",") if starts_by_jobs else []
    nodes_out = [out for out in seen.queue.out if out.node in newest_nodes] if seen.queue else []
    silent = hung_ranks(seen.beats, seen.now, seen.config.cluster) if is_living else []
    waits = waits_for_storage(seen.run, seen.disk_problem, seen.beats, seen.now) if is_living else []
    return {
        "run": str(seen.run),
        "state": seen.state,
        "reason": _reason(seen),
        "last_event": seen.ledger[-1].fields() if seen.ledger else None,
        "step": step,
        "num_steps": seen.config.train.num_steps,
        "loss": last.loss if last else None,
        "losses": last.losses if last else None,
        "step_s": last.step_s if last else None,
        "eta_s": _remaining_s(seen, step),
        "checkpoint": checkpoint.fields() if checkpoint else None,
        "steps_to_repeat": _steps_to_repeat(seen, step),
        "failure": _failure(seen),
        "context_auc": evaluation.context_auc if evaluation else None,
        "owner": _owner(seen.owner),
        "goodput": account.fraction,
        "seconds": account.parts(),
        "jobs": None if seen.queue_is_unknown else [asdict(job) for job in seen.queued_jobs],
        "links": [_link(link) for link in seen.newest_links],
        "nodes_out": [asdict(out) for out in nodes_out],
        "silent_ranks": [asdict(rank) for rank in silent],
        "waiting_for_storage": waits,
        "excluded_nodes": list(excluded_nodes(seen.strikes, seen.now, expires_s=seen.strike_expires_s)),
        "next": _next_commands(seen, [out.node for out in nodes_out]),
    }


def _newest_step(seen: Gathered) -> int:
    """Return the newest known step of the run; 0 before the first."""
    # Not every step is logged: the end of the run and the newest save may know a later one.
    known_by_events = [event.step for event in seen.ledger if event.event == "done"]
    known_by_events += [event.step for event in seen.ledger[-1:] if event.event in ("checkpoint", "resume", "stop")]
    return max([seen.last.step if seen.last else 0, *known_by_events])


def _steps_to_repeat(seen: Gathered, step: int) -> int | None:
    """Return how many steps a dead run has done since its newest checkpoint; None if the run is not dead."""
    if seen.state != "dead":
        return None
    checkpoint = seen.newest_checkpoint
    return max(0, step - (checkpoint.step if checkpoint else 0))


def _remaining_s(seen: Gathered, step: int) -> float | None:
    """Estimate the seconds until the last step is done; None before the first step."""
    # By the median step time of the slowest rank; without heartbeats by the newest step, which may have been long.
    if seen.last is None:
        return None
    medians = [beat.step_s for beat in _of_newest_attempt(seen.beats) if beat.step_s is not None]
    step_s = max(medians, default=seen.last.step_s)
    return float(step_s * max(0, seen.config.train.num_steps - step))


def _owner(lease: HeldLease | None) -> dict[str, Any] | None:
    """Return the process that holds the run folder's lease (the right to train in it), or None if nobody does."""
    if lease is None or lease.owner_has_ended:
        return None
    names = ("holder", "host", "pid", "since", "slurm_job")
    return {**{name: getattr(lease.owner, name) for name in names}, "renewed": lease.renewed}


def _failure(seen: Gathered) -> dict[str, Any] | None:
    """Return why the newest start has failed; None if it has not, or if the run has saved or ended since then."""
    failure = newest_failure(since_newest_start(seen.failures, seen.ledger, seen.owner))
    if failure is None or seen.state == "finished":
        return None
    progress = ("checkpoint", "stop")
    if any(event.event in progress and event.unix_s > failure.unix_s for event in seen.ledger):
        return None
    return {**failure.fields(), "account": failure.description, "fault": failure.kind.fault}


def _link(link: Link) -> dict[str, Any]:
    """Return as a JSON object one start of the ranks by a Slurm job; "ended" is None while the job runs."""
    begin, end = link.begin, link.end
    return {
        "job": begin.job,
        "restart": begin.restart,
        "replacements": begin.replacements,
        "began": begin.time,
        "ended": end.time if end else None,
        "verdict": end.verdict if end else None,
        "why": end.why if end else "",
    }


def hung_ranks(beats: Sequence[Beat], now: float, cluster: ClusterConfig) -> list[Hung]:
    """Return the ranks of the newest start that are silent for too long at Unix time `now`, the likely culprit first.

    The culprit is probably the rank with the fewest steps, because the others wait for it.
    """
    newest_beats = _of_newest_attempt(beats)
    return hung(newest_beats, now, cluster, all_beats=newest_beats)


def waits_for_storage(run: Path, disk_problem: str, beats: Sequence[Beat], now: float) -> list[dict[str, Any]]:
    """Return a JSON object for each rank of a living run that waits for storage.

    "is_training" is False if the training itself waits, for "for_s" seconds, and True if only a write in the
    background does. A run folder that takes no records has an object of its own, with rank None.
    """
    waits: list[dict[str, Any]] = []
    if disk_problem:
        reason = f"{run}: {disk_problem}"
        waits.append({"rank": None, "host": "", "reason": reason, "is_training": True, "for_s": None})
    for beat in _of_newest_attempt(beats):
        is_training = beat.phase != "storage"
        for_s = None if is_training else now - beat.phase_since
        if beat.reason:
            who = {"rank": beat.rank, "host": beat.host, "reason": beat.reason}
            waits.append({**who, "is_training": is_training, "for_s": for_s})
    return waits


def _of_newest_attempt(beats: Sequence[Beat]) -> list[Beat]:
    newest_attempt = max((beat.attempt for beat in beats), default=0)
    return [beat for beat in beats if beat.attempt == newest_attempt]


def _reason(seen: Gathered) -> str:
    """Return why the run is in its state, such as "stop: SIGTERM, 50s ago"; "" if it is living or finished."""
    if seen.state in ("stopped", "dead"):
        return _why_ended(seen)
    if seen.state in ("held", "waiting"):
        return _why_waiting(seen)
    if seen.state == "not begun":
        return _why_not_begun(seen)
    return ""


def _why_ended(seen: Gathered) -> str:
    """Return why a run that was stopped or died has ended, or "" if it has recorded no event."""
    # The verdict on the last job explains more than the last event, unless the run was continued without Slurm.
    newest_job = seen.jobs[-1] if seen.jobs else None
    if isinstance(newest_job, JobEnded) and newest_job.why:
        was_continued = bool(starts(seen.ledger[newest_job.ledger_events :]))
        if not was_continued:
            return newest_job.why
    if not seen.ledger:
        return ""
    event = seen.ledger[-1]
    if event.event not in ENDINGS and seen.owner is not None and seen.owner.owner_has_ended:
        return f"killed: its {seen.owner.owner.holder}, pid {seen.owner.owner.pid}, no longer runs on this machine"
    name = f"{event.event}: {event.why}" if event.why else event.event
    return f"{name}, {seen.age(event)} ago"


def _why_waiting(seen: Gathered) -> str:
    """Return why a run's next job has not started: Slurm's reason, its meaning, and how the previous job ended."""
    waiting = [job for job in seen.queued_jobs if job.state != "RUNNING"]
    # "Dependency" only means that a job waits for another job of the run, so any other reason explains more.
    next_job = next((job for job in waiting if job.reason != "Dependency"), waiting[0])
    meaning = _MEANING_OF_REASON.get(next_job.reason)
    reason = f"{next_job.reason}: {meaning}" if meaning else next_job.reason
    newest_end = seen.newest_links[-1].end if seen.newest_links else None
    return f"{reason}; the last job: {newest_end.why}" if newest_end is not None else reason


def _why_not_begun(seen: Gathered) -> str:
    """Return the likely reason why a run without queued jobs has recorded nothing yet."""
    submitted: list[str] = []  # the ids of all submitted jobs
    for record in seen.jobs:
        if isinstance(record, JobSubmitted):
            submitted += record.jobs
    if not submitted:
        return "it was never submitted, and no start has written a record"
    if seen.newest_links:
        newest = seen.newest_links[-1]
        verdict = "it ended without a verdict"
        if newest.end is not None and newest.end.why:
            verdict = newest.end.why
        return f"job {newest.begin.job} began, and no rank has written a record: {verdict}; see its log in slurm/"
    if seen.queue is None:
        return f"jobs {', '.join(submitted)} were submitted, and Slurm does not answer"
    return (
        f"jobs {', '.join(submitted)} are not in the queue any more, and none has begun: see `sacct -j {submitted[0]}`"
    )


def _next_commands(seen: Gathered, nodes_out: Sequence[str]) -> list[str]:
    """Return the shell commands that the state of the run suggests; `nodes_out` are its nodes out of service."""
    run = shlex.quote(str(seen.run))
    name = job_name(seen.run.absolute())
    if seen.state == "finished":
        return [f"electra-dist export {run}", f"electra-dist report {run}"]
    if seen.state == "living":
        job_id = seen.running_job_id
        log = f"{run}/{SLURM_DIR}/job-{job_id}.log" if job_id else f"{run}/{LOG_FILE}"
        return [f"tail -f {log}", f"touch {run}/{STOP_FILE}    # saves and stops"]
    if seen.state == "waiting":
        return [f"squeue --start --name={name}"]
    if seen.state == "held":
        resume_nodes = [f"scontrol update nodename={node} state=resume" for node in nodes_out]
        return [*resume_nodes, *(f"scontrol release {job.job}" for job in seen.queued_jobs if job.is_held)]
    if seen.submitted_by:
        look = f"squeue --name={name}    # if it lists a job, do not submit another one"
        return [look, seen.submitted_by] if seen.queue_is_unknown else [seen.submitted_by]
    return _commands_that_go_on(seen, run)


def _commands_that_go_on(seen: Gathered, run: str) -> list[str]:
    """Return the commands that start a run without Slurm again, where it ran before; `run` is its quoted folder."""
    # `train` starts as many ranks as before: another number rounds sums in another order.
    if len(seen.ranks_of_hosts) <= 1:
        return [f"electra-dist train {run}"]
    slots = [f"{host} slots={num_ranks}" for host, num_ranks in seen.ranks_of_hosts.items()]
    write_hostfile = f"printf '%s\\n' {shlex.join(slots)} > {run}/hostfile"
    if len(set(seen.ranks_of_hosts.values())) == 1:
        return [write_hostfile, f"electra-dist train {run} --hostfile {run}/hostfile"]
    program = f"--module electra_launcher.pretrain --config {run}/{CONFIG_FILE}"
    move = override_of_moved_run(seen.run, seen.config.run_dir)
    program += f" --set {shlex.quote(move)}" if move else ""
    return [write_hostfile, f"deepspeed --hostfile {run}/hostfile {program}"]
