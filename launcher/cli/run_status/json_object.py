"""Convert the snapshot of a run to a JSON object, for `electra-dist status --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from electra_dist.run.goodput import goodput
from electra_dist.run.history import Link, links, since_submission
from launcher.cli.run_status.explanation import next_commands, reason_of_state
from launcher.cli.run_status.snapshot import RunSnapshot


def json_object(snapshot: RunSnapshot) -> dict[str, Any]:
    """Convert the content of the status page to a JSON object; unknown values are None.

    Keys that end in `_s`, and the values of "seconds", are durations in seconds. Events of the ledger keep their times
    in ISO 8601. "jobs" are the run's jobs in Slurm's queue. "links" are all starts of the run's ranks
    by Slurm jobs since the newest submission.
    """
    checkpoint = snapshot.newest_checkpoint_event
    account = goodput(snapshot.ledger, snapshot.jobs)
    last, evaluation = snapshot.last, snapshot.last_eval
    return {
        "run": str(snapshot.run),
        "state": snapshot.state,
        "reason": reason_of_state(snapshot),
        "last_event": snapshot.ledger[-1].fields() if snapshot.ledger else None,
        "step": snapshot.steps_done,
        "num_steps": snapshot.config.train.num_steps,
        "loss": last.loss if last else None,
        "step_s": last.step_s if last else None,
        "eta_s": snapshot.remaining_s,
        "checkpoint": checkpoint.fields() if checkpoint else None,
        "context_auc": evaluation.context_auc if evaluation else None,
        "owner": _owner(snapshot),
        "goodput": account.fraction,
        "seconds": account.parts(),
        "jobs": None if snapshot.queue_is_unknown else [asdict(job) for job in snapshot.queued_jobs],
        "links": [_link(link) for link in links(since_submission(snapshot.jobs))],
        "nodes_out": [asdict(out) for out in snapshot.nodes_out],
        "silent_ranks": [asdict(rank) for rank in snapshot.hung_ranks],
        "waiting_for_storage": snapshot.waits_for_storage,
        "excluded_nodes": snapshot.excluded_nodes,
        "next": next_commands(snapshot),
    }


def _link(link: Link) -> dict[str, Any]:
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


def _owner(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Return the process that holds the run folder's lease (right to train), with Unix times; None if nobody does."""
    if snapshot.owner is None:
        return None
    owner, renewed = snapshot.owner
    names = ("holder", "host", "pid", "since", "slurm_job")
    return {**{name: getattr(owner, name) for name in names}, "renewed": renewed}
