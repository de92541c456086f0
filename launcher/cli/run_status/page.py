"""Compose the status page of a run, which `electra-dist status` prints, from a snapshot of the run."""

from __future__ import annotations

import math

from electra_dist.analysis.context_auc import is_stuck, stuck_warning
from electra_dist.run.folder import JOBS_FILE
from electra_dist.run.goodput import goodput
from electra_dist.run.history import Link, links, since_submission
from electra_dist.run.number_formats import format_duration
from launcher.cli.run_status.explanation import next_commands, reason_of_state
from launcher.cli.run_status.ranks import hung_rank_lines, storage_lines
from launcher.cli.run_status.snapshot import RunSnapshot

_LINKS_SHOWN = 8  # how many of the newest starts of the ranks by Slurm jobs are listed


def page_lines(snapshot: RunSnapshot) -> list[str]:
    """Return the lines of the status page; the commands to run next come last, indented by four spaces."""
    reason = reason_of_state(snapshot)
    page = [
        f"run {snapshot.run}: {snapshot.state}{f' ({reason})' if reason else ''}",
        f"  step        {_progress(snapshot)}",
        *_phase_lines(snapshot),
        f"  checkpoint  {_newest_checkpoint(snapshot)}",
        *_context_auc_lines(snapshot),
        *_owner_lines(snapshot),
    ]
    account = goodput(snapshot.ledger, snapshot.jobs)
    if account.fraction is not None:
        page.append(f"  goodput     {100 * account.fraction:.1f} % ({account.described()})")
    page += _link_lines(snapshot)
    page += [f"  job         {job.job} {job.state} {job.nodes or job.reason}" for job in snapshot.queued_jobs]
    if snapshot.queue_is_unknown and snapshot.state != "finished":
        page.append("  queue       unknown: squeue failed (Slurm's controller may be away) or is not installed here")
    page += [f"  node        {out.node} {out.state}: {out.reason}" for out in snapshot.nodes_out]
    page += storage_lines(snapshot.waits_for_storage, snapshot.config.cluster.storage_patience_s)
    page += hung_rank_lines(snapshot.hung_ranks)
    page += _excluded_node_lines(snapshot)
    page.append("next:")
    page += [f"    {command}" for command in next_commands(snapshot)]
    return page


def _progress(snapshot: RunSnapshot) -> str:
    """Return the progress of the run, for example "12 of 20 (60.0 %), loss 8.5185, eta 16s"."""
    num_steps = snapshot.config.train.num_steps
    step = snapshot.steps_done
    progress = f"{step:,} of {num_steps:,}"
    if snapshot.last is None:
        return progress
    progress += f" ({100 * step / num_steps:.1f} %), loss {snapshot.last.loss:.4f}"
    if step >= num_steps or snapshot.remaining_s is None:
        return progress
    return f"{progress}, eta {format_duration(snapshot.remaining_s)}"


def _phase_lines(snapshot: RunSnapshot) -> list[str]:
    """Return a line on the corpus that is read now, and the next corpus with its first step; [] without phases."""
    data = snapshot.config.data
    if not data.phases:
        return []
    corpora = data.training_corpora()
    begun = [corpus for corpus in corpora if corpus.from_step <= snapshot.steps_done]
    newest = begun[-1]
    line = f"  corpus      {newest.url} since step {newest.from_step:,} (phase {len(begun)} of {len(corpora)})"
    if len(begun) < len(corpora):
        coming = corpora[len(begun)]
        line += f", {coming.url} from step {coming.from_step:,}"
    return [line]


def _newest_checkpoint(snapshot: RunSnapshot) -> str:
    """Return step and age of the last checkpoint as text, such as "step 10, 1m20s old"; "none yet" without one."""
    newest = snapshot.newest_checkpoint_event
    if newest is None:
        return "none yet"
    return f"step {newest.step:,}, {format_duration(snapshot.age_s(newest))} old"


def _context_auc_lines(snapshot: RunSnapshot) -> list[str]:
    """Return a line on the newest context AUC and, if that stays too low, a warning line; [] without a known AUC."""
    newest = snapshot.last_eval
    if newest is None or not math.isfinite(newest.context_auc):
        return []
    context_lines = [
        f"  context     AUC {newest.context_auc:.4f} at step {newest.step:,} (standard error "
        f"{newest.context_auc_se:.4f})"
    ]
    if is_stuck(newest, snapshot.config):
        context_lines.append(f"  warning     {stuck_warning(newest, snapshot.config)}")
    return context_lines


def _owner_lines(snapshot: RunSnapshot) -> list[str]:
    """Return a line on the process that holds the run folder's lease, or has ended without a release; [] otherwise."""
    if snapshot.owner is None:
        return []
    owner, renewed = snapshot.owner
    age = format_duration(max(0.0, snapshot.now - renewed))
    return [f"  owner       {owner.description}; last renewed {age} ago"]


def _link_lines(snapshot: RunSnapshot) -> list[str]:
    """Return a line for each of the newest eight starts of the ranks by Slurm jobs: the job, and how it ended."""
    shown = links(since_submission(snapshot.jobs))
    link_lines = []
    num_hidden = len(shown) - _LINKS_SHOWN
    if num_hidden > 0:
        link_lines.append(f"  link        {num_hidden} earlier ones: {snapshot.run / JOBS_FILE}")
    for link in shown[-_LINKS_SHOWN:]:
        link_lines.append(f"  link        {_describe_link(link, link.begin.job == snapshot.running_job_id)}")
    return link_lines


def _describe_link(link: Link, is_running: bool) -> str:
    """Return a line such as "4711, requeued 2 times: next: stopped on purpose at step 700"; a verdict comes first."""
    name = link.begin.job
    if link.begin.restart:
        name += f", requeued {link.begin.restart} times"
    if link.begin.replacements:
        name += f", nodes replaced {link.begin.replacements} times"
    if link.end is not None:
        return f"{name}: {link.end.verdict}: {link.end.why}"
    if is_running:
        return f"{name}: runs"
    return f"{name}: ended without a verdict: its first node failed, or the job was killed"


def _excluded_node_lines(snapshot: RunSnapshot) -> list[str]:
    """Return a line for each node that new jobs avoid: for how long, and the newest recorded fault of the node."""
    node_lines = []
    for node in snapshot.excluded_nodes:
        newest = [strike for strike in snapshot.strikes if strike.node == node][-1]
        remaining = format_duration(newest.time + snapshot.strike_expires_s - snapshot.now)
        fault = f"{newest.device} {newest.reason}".lstrip()  # The device is empty if the whole node is at fault.
        node_lines.append(f"  left out    {node} for {remaining} more: {fault}")
    return node_lines
