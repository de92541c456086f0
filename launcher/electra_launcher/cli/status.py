"""Show where a run stands, as the page of `electra-dist status RUN`: a view of the JSON object of run_facts.py."""

from __future__ import annotations

import math
import shlex
from typing import Any

from electra_dist.run.context_auc import is_stuck, stuck_warning
from electra_dist.run.folder import JOBS_FILE, METRICS_FILE
from electra_dist.run.goodput import goodput
from electra_dist.run.metrics import metrics_are_lost
from electra_dist.run.number_formats import format_duration
from electra_launcher.cli.run_facts import Gathered, facts

_LINKS_SHOWN = 8  # how many of the newest starts of the ranks by Slurm jobs are listed
_RANKS_SHOWN = 4  # The first one is the likely culprit; the others usually wait for it.


def lines(seen: Gathered) -> list[str]:
    """Return the lines of the status page; the commands to run next come last, indented by four spaces."""
    known = facts(seen)
    reason = f" ({known['reason']})" if known["reason"] else ""
    checkpoint = seen.newest_checkpoint
    saved = f"step {checkpoint.step:,}, {seen.age(checkpoint)} old" if checkpoint else "none yet"
    num_steps = known["steps_to_repeat"]
    repeated = f"; a restart repeats {num_steps:,} step{'s' if num_steps > 1 else ''}" if num_steps else ""
    page = [
        f"run {known['run']}: {known['state']}{reason}",
        f"  step        {_progress(known, seen)}",
        *_phase_lines(seen, known["step"]),
        f"  checkpoint  {saved}{repeated}",
        *_context_auc_lines(seen),
        *_owner_lines(seen),
    ]
    if known["goodput"] is not None:
        parts = goodput(seen.ledger, seen.jobs).described()
        share = f"{100 * known['goodput']:.1f} %" if known["goodput"] else "known from the first checkpoint on"
        page.append(f"  goodput     {share} ({parts})")
    if known["failure"] is not None:
        page.append(f"  failure     {known['failure']['account']}; more: electra-dist why {shlex.quote(known['run'])}")
    num_hidden = len(known["links"]) - _LINKS_SHOWN
    if num_hidden > 0:
        page.append(f"  link        {num_hidden} earlier ones: {seen.run / JOBS_FILE}")
    page += [f"  link        {_describe_link(link, seen.running_job_id)}" for link in known["links"][-_LINKS_SHOWN:]]
    page += [
        f"  job         {job['job']} {job['state']} {job['nodes'] or job['reason']}" for job in known["jobs"] or ()
    ]
    if known["jobs"] is None and known["state"] != "finished":
        page.append("  queue       unknown: squeue failed (Slurm's controller may be away) or is not installed here")
    page += [f"  node        {out['node']} {out['state']}: {out['reason']}" for out in known["nodes_out"]]
    patience_s = seen.config.cluster.storage_patience_s
    page += [f"  storage     {_describe_wait(w, patience_s)}" for w in known["waiting_for_storage"][:_RANKS_SHOWN]]
    page += [f"  silent      {_describe_silent(rank)}" for rank in known["silent_ranks"][:_RANKS_SHOWN]]
    page += [f"  left out    {_describe_excluded(seen, node)}" for node in known["excluded_nodes"]]
    page.append("next:")
    page += [f"    {command}" for command in known["next"]]
    return page


def lines_of_first_start(known: dict[str, Any]) -> list[str]:
    """Return the lines of the page for a run of which only a first start is known (`first_start`)."""
    owner = known["owner"]
    return [
        f"run {known['run']}: {known['state']} ({known['reason']})",
        f"  owner       {owner['holder']} on host {owner['host']}, pid {owner['pid']}",
        "next:",
        *(f"    {command}" for command in known["next"]),
    ]


def _progress(known: dict[str, Any], seen: Gathered) -> str:
    """Return the progress of the run: "12 of 20 (60.0 %), loss 8.5185 (mlm 6.5185, rtd 0.0400), eta 16s"."""
    step, num_steps = known["step"], known["num_steps"]
    progress = f"{step:,} of {num_steps:,}"
    if known["loss"] is None:
        is_lost = metrics_are_lost(seen.run, seen.ledger)
        return f"{progress}, loss not known, because {METRICS_FILE} is missing" if is_lost else progress
    is_behind = seen.last is not None and seen.last.step < step  # not every step is logged, but every one can be saved
    logged = " at the last logged step" if is_behind else ""
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in known["losses"].items())
    parts = f" ({losses})" if len(known["losses"]) > 1 else ""
    progress += f" ({100 * step / num_steps:.1f} %), loss {known['loss']:.4f}{parts}{logged}"
    if step >= num_steps:
        return progress
    return f"{progress}, eta {format_duration(known['eta_s'])}"


def _phase_lines(seen: Gathered, step: int) -> list[str]:
    """Return a line on the corpus that is read now, the next one and its first step; [] without `data.phases`."""
    if not seen.config.data.phases:
        return []
    corpora = seen.config.data.training_corpora()
    begun = [corpus for corpus in corpora if corpus.from_step <= step]
    line = f"  corpus      {begun[-1].url} since step {begun[-1].from_step:,} (phase {len(begun)} of {len(corpora)})"
    if len(begun) < len(corpora):
        coming = corpora[len(begun)]
        line += f", {coming.url} from step {coming.from_step:,}"
    return [line]


def _context_auc_lines(seen: Gathered) -> list[str]:
    """Return a line on the newest context AUC, and a warning if it stays too low; [] if none was evaluated."""
    newest = seen.last_eval
    if newest is None or not math.isfinite(newest.context_auc):
        return []
    meaning = f"(standard error {newest.context_auc_se:.4f}; 0.5 is chance, 1 is perfect)"
    context_lines = [f"  context     AUC {newest.context_auc:.4f} at step {newest.step:,} {meaning}"]
    if is_stuck(newest, seen.config):
        context_lines.append(f"  warning     {stuck_warning(newest, seen.config)}")
    return context_lines


def _owner_lines(seen: Gathered) -> list[str]:
    """Return a line on the process that has the right to train in the run folder; [] if there is none, or it died."""
    if seen.owner is None or seen.owner.owner_has_ended:
        return []
    age = format_duration(max(0.0, seen.now - seen.owner.renewed))
    return [f"  owner       {seen.owner.owner.description}; last renewed {age} ago"]


def _describe_link(link: dict[str, Any], running_job_id: str) -> str:
    """Return a line on a start by a Slurm job, such as "4711, requeued 2 times: next: stopped on purpose at step 700".

    The verdict on the job, here "next", comes before its reason.
    """
    name: str = link["job"]
    if link["restart"]:
        name += f", requeued {link['restart']} times"
    if link["replacements"]:
        name += f", nodes replaced {link['replacements']} times"
    if link["verdict"] is not None:
        return f"{name}: {link['verdict']}: {link['why']}"
    if link["job"] == running_job_id:
        return f"{name}: runs"
    return f"{name}: ended without a verdict: its first node failed, or the job was killed"


def _describe_wait(wait: dict[str, Any], patience_s: float) -> str:
    """Return who waits for storage, since when and why; `patience_s` is the longest wait allowed."""
    if wait["rank"] is None:
        return f"the run folder takes no records: {wait['reason']}"
    state = "has unwritten records or checkpoints, and trains on"
    if not wait["is_training"]:
        remaining_s = max(0.0, patience_s - wait["for_s"])
        state = f"waits for {format_duration(wait['for_s'])}, at most {format_duration(remaining_s)} more"
    return f"rank {wait['rank']} on {wait['host']} {state}: {wait['reason']}"


def _describe_silent(rank: dict[str, Any]) -> str:
    return f"rank {rank['rank']} on {rank['host']}: {rank['phase']} {rank['step']:,}, {rank['quiet_s']:.0f} s"


def _describe_excluded(seen: Gathered, node: str) -> str:
    """Return for how long new jobs avoid a node, and its newest recorded fault."""
    newest = [strike for strike in seen.strikes if strike.node == node][-1]
    remaining = format_duration(newest.time + seen.strike_expires_s - seen.now)
    fault = f"{newest.device} {newest.reason}".lstrip()  # The device is empty if the whole node is at fault.
    return f"{node} for {remaining} more: {fault}"
