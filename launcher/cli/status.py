"""`electra-dist status RUN`: show where a run stands, and the command to run next.

Guarantee: it only reads; neither the run nor the queue is changed.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from electra_dist.analysis.goodput import goodput
from electra_dist.analysis.hung_ranks import hang_limits, hung
from electra_dist.analysis.run_state import RunEvidence, State, run_state
from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.run.folder import CONFIG_FILE, LOG_FILE, METRICS_FILE, SLURM_DIR, STOP_FILE
from electra_dist.run.heartbeat import Beat, read_heartbeats
from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import read_jobs, read_ledger
from electra_dist.run.metrics_writer import read_metrics
from electra_dist.run.node_strikes import Strike, excluded_nodes, read_strikes
from electra_dist.run.number_formats import format_duration
from launcher.slurm.slurm_queue import NodeOut, QueuedJob, QueueView, queue_view
from launcher.slurm.submission import job_name

_STEPS_OF_PATIENCE = 10  # A run that was silent for this many step times may still be in a long step.


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that is known of a run at one moment: the input of `lines`."""

    run: Path  # the run folder
    now: float  # Unix time
    config: Config
    ledger: list[Record]
    jobs: list[Record]  # the lines of slurm/jobs.jsonl
    last: Record | None  # newest record of a training step; None before the first
    beats: list[Beat]  # last heartbeat of each rank
    strikes: list[Strike]
    queue: QueueView | None  # None without Slurm, or if the run was never submitted
    submitted_by: str  # command line of the newest submission; empty if there was none


def status(
    run: Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")],
) -> None:
    """Show where a run stands, its goodput, its jobs and nodes, and what to do next. Changes nothing."""
    out = Console(highlight=False, soft_wrap=True, markup=False)
    for line in lines(facts(run)):
        out.print(line)


def facts(run: Path) -> Facts:
    """Read everything that `status` shows: the files of the run folder and, for a submitted run, Slurm's queue.

    If a submitted run has not started yet, the config beside its batch script is read.

    Args:
        run: the run folder.

    Raises:
        UserError: `run` is not a run folder, or a file in it is damaged.
    """
    scripts = sorted((run / SLURM_DIR).glob("submission-[0-9]*.sh"))
    config_files = [run / CONFIG_FILE]
    if scripts:
        config_files.append(scripts[-1].with_suffix(".yaml"))
    configs = [file for file in config_files if file.exists()]
    if not configs:
        raise UserError(f"{run}: no such run folder (it has no config.yaml); name the run_dir of a run")
    records = [record for record in read_metrics(run) if record["kind"] == "train"]
    return Facts(
        run=run,
        now=time.time(),
        config=load_config(configs[0]),
        ledger=read_ledger(run),
        jobs=read_jobs(run),
        last=records[-1] if records else None,
        beats=read_heartbeats(run),
        strikes=read_strikes(run),
        queue=queue_view(job_name(run.absolute())) if scripts else None,
        submitted_by=scripts[-1].read_text().splitlines()[1].removeprefix("# ") if scripts else "",
    )


def lines(seen: Facts) -> list[str]:
    """Return the status page as lines; the commands to run next come last, indented by four spaces.

    Args:
        seen: the result of `facts`.
    """
    state = run_state(seen.ledger, _evidence(seen))
    page = [f"run {seen.run}: {state}{_why(seen, state)}", f"  step        {_step(seen)}"]
    checkpoints = [event for event in seen.ledger if event["event"] == "checkpoint"]
    if checkpoints:
        age_s = seen.now - _seconds(checkpoints[-1]["time"])
        page.append(f"  checkpoint  step {checkpoints[-1]['step']:,}, {format_duration(age_s)} old")
    else:
        page.append("  checkpoint  none yet")
    account = goodput(seen.ledger, seen.jobs)
    if account.fraction is not None:
        page.append(f"  goodput     {100 * account.fraction:.1f} % ({account.described()})")
    page += [f"  job         {job.job} {job.state} {job.nodes or job.reason}" for job in _jobs(seen)]
    page += [f"  node        {out.node} {out.state}: {out.reason}" for out in _nodes_out(seen)]
    if state == "living":
        page += _silent(seen)
    expires_s = 3600 * seen.config.cluster.strike_expires_h
    for node in excluded_nodes(seen.strikes, seen.now, expires_s=expires_s):
        newest = [strike for strike in seen.strikes if strike.node == node][-1]
        left = format_duration(newest.time + expires_s - seen.now)
        page.append(f"  left out    {node} for {left} more: {newest.device} {newest.reason}".replace(":  ", ": "))
    return [*page, "next:", *(f"    {command}" for command in _next(seen, state))]


def _evidence(seen: Facts) -> RunEvidence:
    """Return the evidence of the run's state apart from its ledger: its signs of life and its jobs in the queue."""
    signs_of_life = [beat.time for beat in seen.beats]
    signs_of_life += [_seconds(event["time"]) for event in seen.ledger[-1:]]
    metrics = seen.run / METRICS_FILE
    if metrics.exists():
        signs_of_life.append(metrics.stat().st_mtime)
    limits = seen.config.cluster
    is_setting_up = (
        bool(seen.ledger) and seen.ledger[-1]["event"] in ("start", "resume") and not (seen.beats and seen.last)
    )
    if is_setting_up:
        patience_s = limits.hang_setup_s
    else:
        step_s = seen.last["step_s"] if seen.last else 0.0
        silent_steps = max(_STEPS_OF_PATIENCE, seen.config.log.every_steps)
        patience_s = max(limits.hang_step_floor_s, step_s * silent_steps)
    jobs = _jobs(seen)
    return RunEvidence(
        now=seen.now,
        sign_of_life=max(signs_of_life, default=None),
        patience_s=patience_s,
        running=any(job.state == "RUNNING" for job in jobs),
        pending=any(job.state in ("PENDING", "COMPLETING") and not job.is_held for job in jobs),
        held=any(job.is_held for job in jobs),
    )


def _why(seen: Facts, state: State) -> str:
    """Return the reason for the state of the run as text in parentheses; empty for a state that needs no reason."""
    if state in ("stopped", "dead") and seen.jobs and seen.jobs[-1].get("why"):
        return f" ({seen.jobs[-1]['why']})"
    if state in ("stopped", "dead") and seen.ledger:
        last = seen.ledger[-1]
        reason = f"{last['event']}: {last['why']}" if last.get("why") else last["event"]
        return f" ({reason}, {_ago(seen, last)})"
    if state in ("held", "waiting") and seen.queue:
        reason = next(job.reason for job in seen.queue.jobs if job.state != "RUNNING")
        return f" ({reason})"
    return ""


def _step(seen: Facts) -> str:
    """Return the steps done of all steps, the newest loss, and the time that the remaining steps will take."""
    total = seen.config.train.num_steps
    last = seen.last
    if last is None:
        return f"0 of {total:,}"
    step = max(last["step"], *(event["step"] for event in seen.ledger if event["event"] == "done"), 0)
    eta = f", eta {format_duration(last['step_s'] * (total - step))}" if step < total else ""
    return f"{step:,} of {total:,} ({100 * step / total:.1f} %), loss {last['loss']:.4f}{eta}"


def _silent(seen: Facts) -> list[str]:
    """Return a line of the status page for each of the first four hung ranks, the likely culprit first."""
    newest_attempt = max((beat.attempt for beat in seen.beats), default=0)
    beats = [beat for beat in seen.beats if beat.attempt == newest_attempt]
    ranks = hung(beats, seen.now, hang_limits(seen.config.cluster), everyone=lambda: beats)
    return [
        f"  silent      rank {rank.rank} on {rank.host}: {rank.phase} {rank.step:,}, {rank.quiet_s:.0f} s"
        for rank in ranks[:4]
    ]


def _next(seen: Facts, state: State) -> list[str]:
    """Return the commands that a person may want to run in this state of the run."""
    run = shlex.quote(str(seen.run))
    if state == "finished":
        return [f"electra-dist export {run}", f"electra-dist report {run}"]
    if state == "living":
        job = _running_job(seen)
        log = f"{run}/{SLURM_DIR}/job-{job}.log" if job else f"{run}/{LOG_FILE}"
        return [f"tail -f {log}", f"touch {run}/{STOP_FILE}    # saves and stops"]
    if state == "waiting":
        return [f"squeue --start --name={job_name(seen.run.absolute())}"]
    if state == "held" and seen.queue:
        resume_nodes = [f"scontrol update nodename={out.node} state=resume" for out in _nodes_out(seen)]
        release_jobs = [f"scontrol release {job.job}" for job in seen.queue.jobs if job.is_held]
        return resume_nodes + release_jobs
    return [seen.submitted_by or f"deepspeed launcher/pretrain.py --config {run}/{CONFIG_FILE}"]


def _jobs(seen: Facts) -> tuple[QueuedJob, ...]:
    """Return the run's jobs in Slurm's queue; empty without Slurm."""
    return seen.queue.jobs if seen.queue else ()


def _nodes_out(seen: Facts) -> list[NodeOut]:
    """Return the nodes of the run's newest job that Slurm does not use; other nodes do not concern the run."""
    if seen.queue is None:
        return []
    newest_nodes: list[str] = []
    for record in seen.jobs:
        if record["event"] == "begin":
            newest_nodes = record["nodes"].split(",")
    return [out for out in seen.queue.out if out.node in newest_nodes]


def _running_job(seen: Facts) -> str:
    """Return the id of the run's running job; empty if no job runs."""
    return next((job.job for job in _jobs(seen) if job.state == "RUNNING"), "")


def _ago(seen: Facts, event: Record) -> str:
    """Return the age of a ledger event as text, for example "50s ago"."""
    return f"{format_duration(seen.now - _seconds(event['time']))} ago"


def _seconds(time: str) -> float:
    """Return an ISO 8601 time of the ledger as Unix seconds."""
    return datetime.fromisoformat(time).timestamp()
