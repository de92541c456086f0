"""`electra-dist status RUN`: show where a run stands, and the command to run next.

Guarantee: the command only reads; it changes neither the run nor Slurm's queue.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from electra_dist.analysis.context_auc import is_stuck, stuck_warning
from electra_dist.analysis.goodput import goodput
from electra_dist.analysis.hung_ranks import Hung, hang_limits
from electra_dist.analysis.run_classification import RunEvidence, State, run_state
from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.run.folder import CONFIG_FILE, JOBS_FILE, LOG_FILE, METRICS_FILE, SLURM_DIR, STOP_FILE
from electra_dist.run.heartbeat import Beat, read_heartbeats
from electra_dist.run.jsonl import Record
from electra_dist.run.lease.lease_file import LeaseOwner
from electra_dist.run.lease.run_lease import read_owner
from electra_dist.run.ledger import read_jobs, read_ledger
from electra_dist.run.metrics_summary import newest_metrics
from electra_dist.run.node_strikes import Strike, excluded_nodes, read_strikes
from electra_dist.run.number_formats import format_duration
from electra_dist.run.process_identity import is_running
from electra_dist.store.atomic_files import disk_problem
from launcher.cli.console import open_console, print_json
from launcher.cli.options import AsJson
from launcher.cli.status_ranks import hung_rank_lines, hung_ranks, storage_lines, waits_for_storage
from launcher.slurm.job_history import links_of, why_not_begun, why_waiting
from launcher.slurm.slurm_queue import NodeOut, QueuedJob, QueueView, queue_view
from launcher.slurm.submission import job_name

_STEPS_OF_PATIENCE = 10  # A run that was silent for this many step times may still be in a long step.
_LINKS_SHOWN = 8  # how many of the newest starts of the ranks by Slurm jobs are listed


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Snapshot of a run: the content of its run folder, and its jobs in Slurm's queue.

    The function `facts` takes a snapshot, and `lines` formats it as the status page. Terms in the field names: the
    ledger is the run's list of events (start, checkpoint, stop, ...), a beat is the last heartbeat of a rank, and a
    strike is a recorded fault of a node.
    """

    run: Path  # the run folder
    disk_problem: str  # why the disk of the run folder takes no bytes; empty if it takes some
    now: float  # Unix time
    config: Config
    ledger: list[Record]
    jobs: list[Record]  # the lines of slurm/jobs.jsonl
    last: Record | None  # newest record of a training step; None before the first
    last_eval: Record | None  # newest record of an evaluation; None before the first
    beats: list[Beat]  # last heartbeat of each rank
    strikes: list[Strike]
    queue: QueueView | None  # None if squeue is missing or fails, or if the run was never submitted
    submitted_by: str  # command line of the newest submission; empty if there was none
    owner: tuple[LeaseOwner, float] | None  # who holds the lease of the run folder, and when it was renewed; or nobody


def status(
    run: Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")], as_json: AsJson = False
) -> None:
    """Show where a run stands, its jobs and nodes, and what to do next. Changes nothing.

    The goodput, which it also shows, is the time of useful training steps divided by all time outside Slurm's queue.
    """
    seen = facts(run)
    if as_json:
        print_json(json_tree(seen))
        return
    out = open_console(markup=False)
    for line in lines(seen):
        out.print(line)


def facts(run: Path) -> Facts:
    """Read everything that `status` shows: the files of the run folder and, for a submitted run, Slurm's queue.

    If a submitted run has not started yet, its folder has no config.yaml; the copy of the config that `submit` wrote
    beside the batch script is read then.

    Args:
        run: the run folder.

    Raises:
        UserError: `run` is not a run folder, or a file in it is damaged.
    """
    scripts = sorted(script for script in (run / SLURM_DIR).glob("submission-[0-9]*.sh") if script.is_file())
    newest_script = scripts[-1] if scripts else None
    config_file = _config_file(run, newest_script)
    newest = newest_metrics(run)
    return Facts(
        run=run,
        disk_problem=disk_problem(run),
        now=time.time(),
        config=load_config(config_file),
        ledger=read_ledger(run),
        jobs=read_jobs(run),
        last=newest.get("train"),
        last_eval=newest.get("eval"),
        beats=read_heartbeats(run),
        strikes=read_strikes(run),
        queue=queue_view(job_name(run.absolute())) if newest_script else None,
        submitted_by=_submit_command(newest_script) if newest_script else "",
        owner=read_owner(run),
    )


def _config_file(run: Path, newest_script: Path | None) -> Path:
    """Return the path of a run's config file: RUN/config.yaml, which the first start of the run writes.

    Before that, it is the copy that `submit` wrote beside the batch script, RUN/slurm/submission-NNNN.yaml.

    Args:
        run: the run folder.
        newest_script: the run's newest batch script, RUN/slurm/submission-NNNN.sh; None if it was never submitted.

    Raises:
        UserError: `run` is not a run folder.
    """
    if (run / CONFIG_FILE).exists():
        return run / CONFIG_FILE
    if newest_script and newest_script.with_suffix(".yaml").exists():
        return newest_script.with_suffix(".yaml")
    raise UserError(f"{run}: not a run folder, because it has no {CONFIG_FILE}; give the run_dir of a run")


def _submit_command(script: Path) -> str:
    """Return the `electra-dist submit` command line that wrote a batch script; the script's second line holds it."""
    lines_of_script = script.read_text(errors="replace").splitlines()
    return lines_of_script[1].removeprefix("# ") if len(lines_of_script) > 1 else ""


def lines(seen: Facts) -> list[str]:
    """Return the lines of the status page; the commands to run next come last, indented by four spaces.

    Args:
        seen: the snapshot of the run that `facts` has read.
    """
    state = run_state(seen.ledger, _evidence(seen))
    page = [
        f"run {seen.run}: {state}{_reason_in_parentheses(seen, state)}",
        f"  step        {_step(seen)}",
        *_phase_lines(seen),
        f"  checkpoint  {_newest_checkpoint(seen)}",
        *_context_auc_lines(seen),
        *_owner_lines(seen),
    ]
    account = goodput(seen.ledger, seen.jobs)
    if account.fraction is not None:
        page.append(f"  goodput     {100 * account.fraction:.1f} % ({account.described()})")
    page += _link_lines(seen)
    page += [f"  job         {job.job} {job.state} {job.nodes or job.reason}" for job in _jobs(seen)]
    if _queue_is_unknown(seen) and state != "finished":
        page.append("  queue       unknown: squeue failed (Slurm's controller may be away) or is not installed here")
    page += [f"  node        {out.node} {out.state}: {out.reason}" for out in _nodes_out(seen)]
    if state == "living":
        waits = waits_for_storage(seen.run, seen.disk_problem, seen.beats, seen.now)
        page += storage_lines(waits, seen.config.cluster.storage_patience_s)
        page += hung_rank_lines(hung_ranks(seen.beats, seen.now, seen.config.cluster))
    page += _excluded_node_lines(seen)
    page.append("next:")
    page += [f"    {command}" for command in _next_commands(seen, state)]
    return page


def json_tree(seen: Facts) -> dict[str, Any]:
    """Return what the status page shows as a JSON object; unknown values are null. Times are in seconds.

    Args:
        seen: the snapshot of the run that `facts` has read.
    """
    state = run_state(seen.ledger, _evidence(seen))
    account = goodput(seen.ledger, seen.jobs)
    step = _steps_done(seen)
    last_event = seen.ledger[-1] if seen.ledger else None
    evaluation = seen.last_eval or {}
    expires_s = 3600 * seen.config.cluster.strike_expires_h
    silent_ranks: list[Hung] = []
    waits: list[dict[str, Any]] = []
    if state == "living":
        silent_ranks = hung_ranks(seen.beats, seen.now, seen.config.cluster)
        waits = waits_for_storage(seen.run, seen.disk_problem, seen.beats, seen.now)
    return {
        "run": str(seen.run),
        "state": state,
        "reason": _reason_in_parentheses(seen, state).strip(" ()"),
        "last_event": last_event,
        "step": step,
        "num_steps": seen.config.train.num_steps,
        "loss": seen.last["loss"] if seen.last else None,
        "step_s": seen.last["step_s"] if seen.last else None,
        "eta_s": _step_s(seen) * max(0, seen.config.train.num_steps - step) if seen.last else None,
        "checkpoint": _newest_checkpoint_event(seen),
        "context_auc": evaluation.get("context_auc"),
        "owner": _owner_tree(seen),
        "goodput": account.fraction,
        "seconds": account.parts(),
        "jobs": None if _queue_is_unknown(seen) else [asdict(job) for job in _jobs(seen)],
        "links": [asdict(link) for link in links_of(seen.jobs)],
        "nodes_out": [asdict(out) for out in _nodes_out(seen)],
        "silent_ranks": [asdict(rank) for rank in silent_ranks],
        "waiting_for_storage": waits,
        "excluded_nodes": list(excluded_nodes(seen.strikes, seen.now, expires_s=expires_s)),
        "next": _next_commands(seen, state),
    }


def _evidence(seen: Facts) -> RunEvidence:
    """Return what shows the state of the run besides its ledger (list of events).

    This is the time of its last sign of life, how long a living run may be silent, and whether it has a running, a
    pending or a held job in Slurm's queue. Held means that the job waits until a person releases it.
    """
    jobs = _jobs(seen)
    return RunEvidence(
        now=seen.now,
        sign_of_life=_newest_sign_of_life(seen),
        patience_s=_patience_s(seen),
        running=any(job.state == "RUNNING" for job in jobs),
        pending=any(job.state in ("PENDING", "COMPLETING") and not job.is_held for job in jobs),
        held=any(job.is_held for job in jobs),
    )


def _newest_sign_of_life(seen: Facts) -> float | None:
    """Return the Unix time of the newest write by the run: a heartbeat, a metrics record or an event in its ledger.

    None means that the run has written nothing yet.
    """
    times = [beat.time for beat in seen.beats]
    if seen.ledger:
        times.append(_seconds(seen.ledger[-1]["time"]))
    metrics = seen.run / METRICS_FILE
    if metrics.exists():
        times.append(metrics.stat().st_mtime)
    return max(times, default=None)


def _patience_s(seen: Facts) -> float:
    """Return for how many seconds the run may write nothing (no heartbeat, metric or event) and still count as living.

    Between a start and the first training step this is the limit `cluster.hang_setup_s`. Afterwards it is the time of
    ten steps, or of `log.every_steps` steps if that is more, and at least `cluster.hang_step_floor_s`. While a rank
    waits for storage, it is the longest time for which a rank may.
    """
    limits = seen.config.cluster
    has_just_started = bool(seen.ledger) and seen.ledger[-1]["event"] in ("start", "resume")
    has_trained = bool(seen.beats) and seen.last is not None
    if has_just_started and not has_trained:
        return limits.hang_setup_s
    is_waiting = any(beat.phase == "storage" for beat in seen.beats) or seen.disk_problem
    if is_waiting:
        return max(limits.hang_step_floor_s, hang_limits(limits).storage_s)
    step_s = 0.0 if seen.last is None else seen.last["step_s"]
    num_silent_steps = max(_STEPS_OF_PATIENCE, seen.config.log.every_steps)
    return max(limits.hang_step_floor_s, step_s * num_silent_steps)


def _reason_in_parentheses(seen: Facts, state: State) -> str:
    """Return the reason for the state of the run, for example " (stop: SIGTERM, 50s ago)"; "" if there is none.

    The states living and finished have no reason.
    """
    if state in ("stopped", "dead"):
        # The launcher's own reason explains more than the ledger's last event.
        job_reason = seen.jobs[-1].get("why") if seen.jobs else None
        if job_reason:
            return f" ({job_reason})"
        if seen.ledger:
            return f" ({_describe_event(seen, seen.ledger[-1])})"
    if state in ("held", "waiting") and seen.queue:
        return f" ({why_waiting(seen.queue, seen.jobs)})"
    if state == "not begun":
        return f" ({why_not_begun(seen.queue, seen.jobs)})"
    return ""


def _describe_event(seen: Facts, event: Record) -> str:
    """Return an event of the run's ledger as text: its name, its reason if it has one, and its age.

    For example "stop: SIGTERM, 50s ago".
    """
    age = format_duration(seen.now - _seconds(event["time"]))
    if event.get("why"):
        return f"{event['event']}: {event['why']}, {age} ago"
    return f"{event['event']}, {age} ago"


def _step(seen: Facts) -> str:
    """Return the progress of the run, for example "12 of 20 (60.0 %), loss 8.5185, eta 16s".

    Step and loss are those of the newest metrics record. The remaining time assumes that every further step takes as
    long as `_step_s` returns; it is left out when all steps are done.
    """
    num_steps = seen.config.train.num_steps
    last = seen.last
    if last is None:
        return f"0 of {num_steps:,}"
    step = _steps_done(seen)
    progress = f"{step:,} of {num_steps:,} ({100 * step / num_steps:.1f} %), loss {last['loss']:.4f}"
    if step >= num_steps:
        return progress
    remaining_s = _step_s(seen) * (num_steps - step)
    return f"{progress}, eta {format_duration(remaining_s)}"


def _step_s(seen: Facts) -> float:
    """Return how many seconds a step usually takes, for the estimate of the remaining time.

    Each rank writes the median of its newest step times into its heartbeat; the result is the largest of these. If no
    heartbeat has one, the result is the step time of the newest metrics record, which may be much longer than usual,
    for example if that step waited for storage. There must be a metrics record (`seen.last`).
    """
    assert seen.last is not None
    newest_attempt = max((beat.attempt for beat in seen.beats), default=0)
    medians = [beat.step_s for beat in seen.beats if beat.attempt == newest_attempt and beat.step_s is not None]
    return max(medians, default=seen.last["step_s"])


def _link_lines(seen: Facts) -> list[str]:
    """Return lines of the status page about the jobs of the newest submission: what each did, and how it ended.

    There is one line for each start of the ranks by a job. Only the newest eight are listed; a line before them has
    the number of the others.
    """
    running_job = _running_job_id(seen)
    links = links_of(seen.jobs)
    page_lines = []
    num_hidden = len(links) - _LINKS_SHOWN
    if num_hidden > 0:
        page_lines.append(f"  link        {num_hidden} earlier ones: {seen.run / JOBS_FILE}")
    for link in links[-_LINKS_SHOWN:]:
        page_lines.append(f"  link        {link.described(link.job == running_job)}")
    return page_lines


def _phase_lines(seen: Facts) -> list[str]:
    """Return the line that names the present corpus and the next one with its first step; [] without `data.phases`."""
    if not seen.config.data.phases:
        return []
    corpora = seen.config.data.training_corpora()
    begun = [corpus for corpus in corpora if corpus.from_step <= _steps_done(seen)]
    newest = begun[-1]
    line = f"  corpus      {newest.url} since step {newest.from_step:,} (phase {len(begun)} of {len(corpora)})"
    if len(begun) < len(corpora):
        coming = corpora[len(begun)]
        line += f", {coming.url} from step {coming.from_step:,}"
    return [line]


def _steps_done(seen: Facts) -> int:
    """Return the number of steps that the run has recorded as done.

    The last steps of a finished run may have no metrics record, but its `done` event has the step.
    """
    done_steps = [event["step"] for event in seen.ledger if event["event"] == "done"]
    recorded_steps = [seen.last["step"]] if seen.last else []
    return max([0, *recorded_steps, *done_steps])


def _newest_checkpoint_event(seen: Facts) -> Record | None:
    """Return the event of the last checkpoint that the ledger records; None if it records none."""
    checkpoints = [event for event in seen.ledger if event["event"] == "checkpoint"]
    return checkpoints[-1] if checkpoints else None


def _newest_checkpoint(seen: Facts) -> str:
    """Return the step and the age of the last checkpoint that the ledger records, "step 10, 1m20s old".

    Returns "none yet" if it records none.
    """
    newest = _newest_checkpoint_event(seen)
    if newest is None:
        return "none yet"
    age_s = seen.now - _seconds(newest["time"])
    return f"step {newest['step']:,}, {format_duration(age_s)} old"


def _context_auc_lines(seen: Facts) -> list[str]:
    """Return a line with the context AUC of the newest evaluation, and a warning below it if the run is stuck.

    The list is empty if no evaluation has a context AUC: before the first one, for an objective without a
    discriminator, and for runs of older versions.
    """
    if seen.last_eval is None or not math.isfinite(seen.last_eval.get("context_auc", math.nan)):
        return []
    newest = seen.last_eval
    page_lines = [
        f"  context     AUC {newest['context_auc']:.4f} at step {newest['step']:,} (standard error "
        f"{newest['context_auc_se']:.4f})"
    ]
    if is_stuck(newest, seen.config):
        page_lines.append(f"  warning     {stuck_warning(newest, seen.config)}")
    return page_lines


def _owner_lines(seen: Facts) -> list[str]:
    """Return a line on the process that holds the lease of the run folder, and trains in it; none if nobody does."""
    if seen.owner is None:
        return []
    owner, renewed = seen.owner
    age = format_duration(max(0.0, seen.now - renewed))
    gone = ", which has ended" if is_running(owner.process) is False else ""
    return [f"  owner       {owner.description}{gone}; last renewed {age} ago"]


def _owner_tree(seen: Facts) -> dict[str, Any] | None:
    """Return the process that holds the lease of the run folder, with Unix times; None if nobody does."""
    if seen.owner is None:
        return None
    owner, renewed = seen.owner
    names = ("holder", "host", "pid", "since", "slurm_job")
    return {**{name: getattr(owner, name) for name in names}, "renewed": renewed}


def _excluded_node_lines(seen: Facts) -> list[str]:
    """Return a line of the status page for each node that new jobs of the run do not use, because of a recent fault.

    Each fault of a node is recorded as a strike, which expires after `cluster.strike_expires_h` hours. The line has
    the time until then and the reason of the newest strike.
    """
    expires_s = 3600 * seen.config.cluster.strike_expires_h
    page_lines = []
    for node in excluded_nodes(seen.strikes, seen.now, expires_s=expires_s):
        newest = [strike for strike in seen.strikes if strike.node == node][-1]
        remaining = format_duration(newest.time + expires_s - seen.now)
        line = f"  left out    {node} for {remaining} more: {newest.device} {newest.reason}"
        page_lines.append(line.replace(":  ", ": "))  # The device is empty if the node as a whole is at fault.
    return page_lines


def _next_commands(seen: Facts, state: State) -> list[str]:
    """Return the shell commands that the status page suggests in this state of the run, the most likely one first.

    For example export for a finished run, tail -f of the log for a living one, and the command that starts it again
    for a stopped one.
    """
    run = shlex.quote(str(seen.run))
    if state == "finished":
        return [f"electra-dist export {run}", f"electra-dist report {run}"]
    if state == "living":
        job_id = _running_job_id(seen)
        log = f"{run}/{SLURM_DIR}/job-{job_id}.log" if job_id else f"{run}/{LOG_FILE}"
        return [f"tail -f {log}", f"touch {run}/{STOP_FILE}    # saves and stops"]
    if state == "waiting":
        return [f"squeue --start --name={job_name(seen.run.absolute())}"]
    if state == "held" and seen.queue:
        resume_nodes = [f"scontrol update nodename={out.node} state=resume" for out in _nodes_out(seen)]
        release_jobs = [f"scontrol release {job.job}" for job in seen.queue.jobs if job.is_held]
        return resume_nodes + release_jobs
    # The run does not run: start it again, in the way in which it was started before.
    if seen.submitted_by:
        look = f"squeue --name={job_name(seen.run.absolute())}    # if it lists a job, do not submit another one"
        return [look, seen.submitted_by] if _queue_is_unknown(seen) else [seen.submitted_by]
    return [f"deepspeed --module launcher.pretrain --config {run}/{CONFIG_FILE}"]


def _queue_is_unknown(seen: Facts) -> bool:
    """Return whether the run was submitted to Slurm, and squeue gave no answer."""
    return bool(seen.submitted_by) and seen.queue is None


def _jobs(seen: Facts) -> tuple[QueuedJob, ...]:
    """Return the run's jobs in Slurm's queue; empty if there is no Slurm or the run was never submitted."""
    return seen.queue.jobs if seen.queue else ()


def _nodes_out(seen: Facts) -> list[NodeOut]:
    """Return the nodes of the run's last started job that Slurm does not use now, because they are drained or down.

    Other drained nodes of the cluster are left out. Empty without Slurm, or if no job of the run has started yet.
    """
    if seen.queue is None:
        return []
    begin_records = [record for record in seen.jobs if record["event"] == "begin"]
    if not begin_records:
        return []
    newest_nodes = begin_records[-1]["nodes"].split(",")
    return [out for out in seen.queue.out if out.node in newest_nodes]


def _running_job_id(seen: Facts) -> str:
    """Return the Slurm id of the run's job that is in state RUNNING; empty if there is none."""
    return next((job.job for job in _jobs(seen) if job.state == "RUNNING"), "")


def _seconds(time: str) -> float:
    """Convert a time as the ledger has it, ISO 8601 with zone ("2026-01-31T12:00:00+00:00"), to Unix seconds."""
    return datetime.fromisoformat(time).timestamp()
