"""Where a run stands: living, waiting, held, stopped, dead or finished. A pure function of what can be seen.

Seen are the ledger, the newest sign of life (a heartbeat, a metrics record, a ledger event) and, where there is Slurm,
the run's jobs in its queue. The queue rules where it answers: a job that runs is a living run even if it is silent.

Where it stops: without a scheduler, a run that was killed cannot be told from one in a long step until the sign of
life is older than `patience_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from electra_dist.run.jsonl import Record

State = Literal["finished", "living", "held", "waiting", "stopped", "dead", "not begun"]


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """What is known of a run apart from its ledger."""

    now: float  # Unix seconds
    sign_of_life: float | None  # Unix seconds of the newest one
    patience_s: float  # how long a living run may be silent
    running: bool = False  # a job of it runs
    pending: bool = False  # a job of it waits in the queue by itself
    held: bool = False  # a job of it waits for a person


def run_state(ledger: Sequence[Record], evidence: RunEvidence) -> State:
    """The one word."""
    ending = ledger[-1]["event"] if ledger else ""
    if any(event["event"] == "done" for event in ledger):
        return "finished"
    if evidence.running:
        return "living"
    if evidence.held:
        return "held"
    if evidence.pending:
        return "waiting"
    if not ledger and evidence.sign_of_life is None:
        return "not begun"
    silent_s = evidence.now - (evidence.sign_of_life or 0.0)
    if ending not in ("stop", "crash", "unhealthy") and silent_s < evidence.patience_s:
        return "living"
    return "stopped" if ending == "stop" else "dead"
