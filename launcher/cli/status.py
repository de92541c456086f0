"""`electra-dist status RUN`: where a run stands, and the command that it needs next. Reads; changes nothing."""

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
from electra_dist.analysis.hangs import hang_limits, hung
from electra_dist.analysis.run_state import RunEvidence, State, run_state
from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.run.folder import CONFIG_FILE, LOG_FILE, METRICS_FILE, SLURM_DIR, STOP_FILE
from electra_dist.run.formats import format_duration
from electra_dist.run.heartbeat import Beat, read_heartbeats
from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import read_jobs, read_ledger
from electra_dist.run.metrics import read_metrics
from electra_dist.run.strikes import Strike, excluded_nodes, read_strikes
from launcher.slurm.queue import NodeOut, QueueView, queue_view
from launcher.slurm.submission import job_name

_STEPS_OF_PATIENCE = 10


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that `lines` tells from."""

    run: Path
    now: float
    config: Config
    ledger: list[Record]
    jobs: list[Record]
    last: Record | None  # newest step record
    beats: list[Beat]
    strikes: list[Strike]
    queue: QueueView | None
    submitted_by: str  # what a person typed last; empty if nobody submitted


def status(
    run: Annotated[Path, typer.Argument(help="a run's folder, for example runs/demo_cpu")],
) -> None:
    """Where a run stands, what it has cost, and what to do next."""
    out = Console(highlight=False, soft_wrap=True, markup=False)
    for line in lines(facts(run)):
        out.print(line)


def facts(run: Path) -> Facts:
    """Look.

    Raises:
        UserError: there is no such run.
    """
    scripts = sorted((run / SLURM_DIR).glob("submission-[0-9]*.sh"))
    configs = [file for file in (run / CONFIG_FILE, *(s.with_suffix(".yaml") for s in scripts[-1:])) if file.exists()]
    if not configs:
        raise UserError(f"{run}: no such run folder (it has no config.yaml); give the run_dir of a run")
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
    """The page, line by line; commands to type are indented by four."""
    state = run_state(seen.ledger, _evidence(seen))
    said = [f"run {seen.run}: {state}{_why(seen, state)}", f"  step        {_step(seen)}"]
    saved = [event for event in seen.ledger if event["event"] == "checkpoint"]
    if saved:
        age_s = seen.now - _seconds(saved[-1]["time"])
        said.append(f"  checkpoint  step {saved[-1]['step']:,}, {format_duration(age_s)} old")
    else:
        said.append("  checkpoint  none yet")
    account = goodput(seen.ledger, seen.jobs)
    if account.fraction is not None:
        said.append(f"  goodput     {100 * account.fraction:.1f} % ({account.described()})")
    said += [f"  job         {j.job} {j.state} {j.nodes or j.reason}" for j in (seen.queue.jobs if seen.queue else ())]
    said += [f"  node        {n.node} {n.state}: {n.reason}" for n in _nodes_out(seen)]
    said += _silent(seen) if state == "living" else []
    expires_s = 3600 * seen.config.cluster.strike_expires_h
    for node in excluded_nodes(seen.strikes, seen.now, expires_s=expires_s):
        newest = [strike for strike in seen.strikes if strike.node == node][-1]
        left = format_duration(newest.time + expires_s - seen.now)
        said.append(f"  left out    {node} for {left} more: {newest.device} {newest.reason}".replace(":  ", ": "))
    return [*said, "next:", *(f"    {command}" for command in _next(seen, state))]


def _evidence(seen: Facts) -> RunEvidence:
    jobs = seen.queue.jobs if seen.queue else ()
    times = [beat.time for beat in seen.beats] + [_seconds(event["time"]) for event in seen.ledger[-1:]]
    metrics = seen.run / METRICS_FILE
    times += [metrics.stat().st_mtime] if metrics.exists() else []
    step_s = seen.last["step_s"] if seen.last else 0.0
    limits = seen.config.cluster
    patience_s = max(limits.hang_step_floor_s, step_s * max(_STEPS_OF_PATIENCE, seen.config.log.every_steps))
    if seen.ledger and seen.ledger[-1]["event"] in ("start", "resume") and not (seen.beats and seen.last):
        patience_s = limits.hang_setup_s
    return RunEvidence(
        now=seen.now,
        sign_of_life=max(times, default=None),
        patience_s=patience_s,
        running=any(job.state == "RUNNING" for job in jobs),
        pending=any(job.state in ("PENDING", "COMPLETING") and not job.is_held for job in jobs),
        held=any(job.is_held for job in jobs),
    )


def _why(seen: Facts, state: State) -> str:
    if state in ("stopped", "dead") and seen.jobs and seen.jobs[-1].get("why"):
        return f" ({seen.jobs[-1]['why']})"
    if state in ("stopped", "dead") and seen.ledger:
        last = seen.ledger[-1]
        return f" ({last['event']}{': ' + last['why'] if last.get('why') else ''}, {_ago(seen, last)})"
    if state in ("held", "waiting") and seen.queue:
        return f" ({next(j.reason for j in seen.queue.jobs if j.state != 'RUNNING')})"
    return ""


def _step(seen: Facts) -> str:
    total, last = seen.config.train.num_steps, seen.last
    if last is None:
        return f"0 of {total:,}"
    step = max(last["step"], *(e["step"] for e in seen.ledger if e["event"] == "done"), 0)
    eta = f", eta {format_duration(last['step_s'] * (total - step))}" if step < total else ""
    return f"{step:,} of {total:,} ({100 * step / total:.1f} %), loss {last['loss']:.4f}{eta}"


def _silent(seen: Facts) -> list[str]:
    attempt = max((beat.attempt for beat in seen.beats), default=0)
    newest = [beat for beat in seen.beats if beat.attempt == attempt]
    silent = hung(newest, seen.now, hang_limits(seen.config.cluster), everyone=lambda: newest)
    return [f"  silent      rank {h.rank} on {h.host}: {h.phase} {h.step:,}, {h.quiet_s:.0f} s" for h in silent[:4]]


def _next(seen: Facts, state: State) -> list[str]:
    run = shlex.quote(str(seen.run))
    again = seen.submitted_by or f"deepspeed launcher/pretrain.py --config {run}/{CONFIG_FILE}"
    if state == "finished":
        return [f"electra-dist export {run}", f"electra-dist report {run}"]
    if state == "living":
        log = f"{run}/{SLURM_DIR}/job-{_running(seen)}.log" if _running(seen) else f"{run}/{LOG_FILE}"
        return [f"tail -f {log}", f"touch {run}/{STOP_FILE}    # saves and stops"]
    if state == "waiting":
        return [f"squeue --start --name={job_name(seen.run.absolute())}"]
    if state == "held" and seen.queue:
        nodes = [f"scontrol update nodename={out.node} state=resume" for out in _nodes_out(seen)]
        return [*nodes, *(f"scontrol release {job.job}" for job in seen.queue.jobs if job.is_held)]
    return [again]


def _nodes_out(seen: Facts) -> list[NodeOut]:
    """Nodes of the run's newest job that Slurm does not use; what is wrong elsewhere is not the run's business."""
    ours: list[str] = next((job["nodes"].split(",") for job in reversed(seen.jobs) if job["event"] == "begin"), [])
    return [out for out in (seen.queue.out if seen.queue else ()) if out.node in ours]


def _running(seen: Facts) -> str:
    return next((job.job for job in (seen.queue.jobs if seen.queue else ()) if job.state == "RUNNING"), "")


def _ago(seen: Facts, event: Record) -> str:
    return f"{format_duration(seen.now - _seconds(event['time']))} ago"


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
