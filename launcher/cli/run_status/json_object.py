"""Convert the snapshot of a run to a JSON object, for `electra-dist status --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from electra_dist.analysis.wall_time.goodput import goodput
from launcher.cli.run_status.explanation import next_commands, reason_of_state
from launcher.cli.run_status.snapshot import RunSnapshot
from launcher.slurm.job_history import links_of


def json_object(snapshot: RunSnapshot) -> dict[str, Any]:
    """Convert the content of the status page to a JSON object; unknown values are None.

    Keys that end in `_s`, and the values of "seconds", are durations in seconds. Events of the ledger keep their times
    in ISO 8601. "jobs" are the run's jobs in Slurm's queue. "links" are all starts of the run's ranks by Slurm jobs.
    """
    account = goodput(snapshot.ledger, snapshot.jobs)
    last = snapshot.last or {}
    evaluation = snapshot.last_eval or {}
    return {
        "run": str(snapshot.run),
        "state": snapshot.state,
        "reason": reason_of_state(snapshot),
        "last_event": snapshot.ledger[-1] if snapshot.ledger else None,
        "step": snapshot.steps_done,
        "num_steps": snapshot.config.train.num_steps,
        "loss": last.get("loss"),
        "step_s": last.get("step_s"),
        "eta_s": snapshot.remaining_s,
        "checkpoint": snapshot.newest_checkpoint_event,
        "context_auc": evaluation.get("context_auc"),
        "owner": _owner(snapshot),
        "goodput": account.fraction,
        "seconds": account.parts(),
        "jobs": None if snapshot.queue_is_unknown else [asdict(job) for job in snapshot.queued_jobs],
        "links": [asdict(link) for link in links_of(snapshot.jobs)],
        "nodes_out": [asdict(out) for out in snapshot.nodes_out],
        "silent_ranks": [asdict(rank) for rank in snapshot.hung_ranks],
        "waiting_for_storage": snapshot.waits_for_storage,
        "excluded_nodes": snapshot.excluded_nodes,
        "next": next_commands(snapshot),
    }


def _owner(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Return the process that holds the run folder's lease (right to train), with Unix times; None if nobody does."""
    if snapshot.owner is None:
        return None
    owner, renewed = snapshot.owner
    names = ("holder", "host", "pid", "since", "slurm_job")
    return {**{name: getattr(owner, name) for name in names}, "renewed": renewed}
