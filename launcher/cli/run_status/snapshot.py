"""Take a snapshot of a run for `electra-dist status`: the content of its run folder, and its jobs in Slurm's queue."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.run.environment_record import read_environment
from electra_dist.run.folder import CONFIG_FILE, METRICS_FILE, SLURM_DIR
from electra_dist.run.heartbeat import Beat, Hung, hang_limits, read_heartbeats
from electra_dist.run.history import STARTS, RunEvidence, State, links, run_state
from electra_dist.run.lease import LeaseOwner, read_owner
from electra_dist.run.ledger import JobRecord, LedgerEvent, read_jobs, read_ledger
from electra_dist.run.metrics import EvalRecord, StepRecord, newest_metrics
from electra_dist.run.strikes import Strike, excluded_nodes, read_strikes
from electra_dist.store.atomic_files import disk_problem
from electra_dist.store.regular_files import read_regular
from launcher.cli.run_status.ranks import hung_ranks, waits_for_storage
from launcher.slurm.batch_script import job_name
from launcher.slurm.slurm import NodeOut, QueuedJob, QueueView, queue_view

_STEPS_OF_PATIENCE = 10  # step times for which a living run may be silent, because a step may take longer than usual


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """State of a run at one moment, as its files and Slurm's queue show it."""

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
    queue: QueueView | None  # None if squeue is missing or fails, or if the run was never submitted
    submitted_by: str  # command line of the newest submission; empty if there was none
    ranks_of_hosts: dict[str, int]  # ranks of the last start on each host; empty before the first start
    owner: tuple[LeaseOwner, float] | None  # holder of the run folder's lease, Unix time of renewal; None: nobody

    @cached_property
    def state(self) -> State:
        """Return the state of the run: living, finished, stopped, dead, held, waiting or not begun."""
        return run_state(self.ledger, self._evidence())

    @property
    def steps_done(self) -> int:
        """Return the number of steps that the metrics, or the event "done" of the ledger, record as done."""
        done_steps = [event.step for event in self.ledger if event.event == "done"]
        recorded_steps = [self.last.step] if self.last else []
        return max([0, *recorded_steps, *done_steps])

    @property
    def remaining_s(self) -> float | None:
        """Return an estimate of the seconds until the last step is done; None before the first step.

        A step is assumed to take the median step time of the slowest rank, from the heartbeats. Without heartbeats it
        is assumed to take as long as the newest step, which may have been unusually long.
        """
        if self.last is None:
            return None
        newest_attempt = max((beat.attempt for beat in self.beats), default=0)
        medians = [beat.step_s for beat in self.beats if beat.attempt == newest_attempt and beat.step_s is not None]
        step_s = max(medians, default=self.last.step_s)
        return float(step_s * max(0, self.config.train.num_steps - self.steps_done))

    @property
    def newest_checkpoint_event(self) -> LedgerEvent | None:
        """Return the last event "checkpoint" of the ledger, even if an earlier one has a higher step; None if none."""
        checkpoints = [event for event in self.ledger if event.event == "checkpoint"]
        return checkpoints[-1] if checkpoints else None

    @property
    def queued_jobs(self) -> tuple[QueuedJob, ...]:
        """Return the run's jobs in Slurm's queue; empty if there is no Slurm or the run was never submitted."""
        return self.queue.jobs if self.queue else ()

    @property
    def queue_is_unknown(self) -> bool:
        """Return whether the run was submitted to Slurm but squeue gave no answer."""
        return bool(self.submitted_by) and self.queue is None

    @property
    def running_job_id(self) -> str:
        """Return Slurm's id of the run's job that is in state RUNNING; empty if there is none."""
        return next((job.job for job in self.queued_jobs if job.state == "RUNNING"), "")

    @property
    def job_name(self) -> str:
        """Return the name that the jobs of this run have in Slurm's queue."""
        return job_name(self.run.absolute())

    @property
    def nodes_out(self) -> list[NodeOut]:
        """Return the nodes of the last started job that are drained, down or failed, so that Slurm avoids them."""
        if self.queue is None:
            return []
        starts_by_jobs = links(self.jobs)
        if not starts_by_jobs:
            return []
        newest_nodes = starts_by_jobs[-1].begin.nodes.split(",")
        return [out for out in self.queue.out if out.node in newest_nodes]

    @property
    def excluded_nodes(self) -> list[str]:
        """Return the nodes that new jobs avoid because of a fault in the last `cluster.strike_expires_h` hours."""
        return list(excluded_nodes(self.strikes, self.now, expires_s=self.strike_expires_s))

    @property
    def strike_expires_s(self) -> float:
        """Return after how many seconds a recorded fault of a node no longer counts."""
        return 3600 * self.config.cluster.strike_expires_h

    @property
    def hung_ranks(self) -> list[Hung]:
        """Return the ranks of a living run that make no progress, the likely culprit first; [] for any other run."""
        return hung_ranks(self.beats, self.now, self.config.cluster) if self.state == "living" else []

    @property
    def waits_for_storage(self) -> list[dict[str, Any]]:
        """Return the waits for storage of a living run, as JSON objects (see ranks.py); [] for any other run."""
        if self.state != "living":
            return []
        return waits_for_storage(self.run, self.disk_problem, self.beats, self.now)

    def age_s(self, event: LedgerEvent) -> float:
        """Return how long ago an event of the ledger was recorded, in seconds; 0 if this node's clock is behind."""
        return max(0.0, self.now - event.unix_s)

    def _evidence(self) -> RunEvidence:
        """Return the facts that, with the ledger, tell the state of the run: signs of life, and jobs in the queue."""
        jobs = self.queued_jobs
        return RunEvidence(
            now=self.now,
            sign_of_life=self._newest_sign_of_life(),
            patience_s=self._longest_silence_s(),
            running=any(job.state == "RUNNING" for job in jobs),
            pending=any(job.state in ("PENDING", "COMPLETING") and not job.is_held for job in jobs),
            held=any(job.is_held for job in jobs),
        )

    def _newest_sign_of_life(self) -> float | None:
        """Return the Unix time of the newest heartbeat, metrics record or ledger event; None if there is none."""
        times = [beat.time for beat in self.beats]
        if self.ledger:
            times.append(self.ledger[-1].unix_s)
        if self.metrics_written is not None:
            times.append(self.metrics_written)
        return max(times, default=None)

    def _longest_silence_s(self) -> float:
        """Return for how many seconds a run may write no heartbeat, metrics or event before it counts as dead."""
        cluster = self.config.cluster
        if self.disk_problem or any(beat.phase == "storage" for beat in self.beats):
            return max(cluster.hang_step_floor_s, hang_limits(cluster).storage_s)
        newest_event = self.ledger[-1] if self.ledger else None
        if newest_event is not None and newest_event.event in STARTS:
            has_trained = any(beat.step > newest_event.step for beat in self.beats)
            if not has_trained:
                return cluster.hang_setup_s
        step_s = 0.0 if self.last is None else self.last.step_s
        num_silent_steps = max(_STEPS_OF_PATIENCE, self.config.log.every_steps)
        return max(cluster.hang_step_floor_s, step_s * num_silent_steps)


def take_snapshot(run: Path) -> RunSnapshot:
    """Read everything that `status` shows: the files of the run folder and, for a submitted run, Slurm's queue.

    A UserError means that `run` is not a run folder, or that a file in it is damaged.
    """
    scripts = sorted(script for script in (run / SLURM_DIR).glob("submission-[0-9]*.sh") if script.is_file())
    newest_script = scripts[-1] if scripts else None
    config_file = _config_file(run, newest_script)
    config = load_config(config_file)
    newest = newest_metrics(run, with_evaluation=bool(config.data.heldout))
    metrics = run / METRICS_FILE
    return RunSnapshot(
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
        queue=queue_view(job_name(run.absolute())) if newest_script else None,
        submitted_by=_submit_command(newest_script) if newest_script else "",
        ranks_of_hosts=read_environment(run).get("hosts", {}),
        owner=read_owner(run),
    )


def _config_file(run: Path, newest_script: Path | None) -> Path:
    """Return RUN/config.yaml or, before the first start writes it, the copy beside the newest batch script."""
    if (run / CONFIG_FILE).exists():
        return run / CONFIG_FILE
    if newest_script and newest_script.with_suffix(".yaml").exists():
        return newest_script.with_suffix(".yaml")
    raise UserError(f"{run}: not a run folder, because it has no {CONFIG_FILE}; give the run_dir of a run")


def _submit_command(script: Path) -> str:
    """Return the command line that wrote a batch script, from the script's second line."""
    lines_of_script = read_regular(script).decode(errors="replace").splitlines()
    return lines_of_script[1].removeprefix("# ") if len(lines_of_script) > 1 else ""
