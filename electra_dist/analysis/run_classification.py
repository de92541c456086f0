"""Classify the state of a run: living, waiting, held, stopped, dead, finished or not begun.

The evidence is the ledger (the run's event log), the newest sign of life (a heartbeat, a metrics record or a ledger
event) and, with Slurm, the queue. If a job runs, the run is living, even if it is silent.

Limits: without Slurm, a killed run looks like a run in a long step until the newest sign of life is older than
`RunEvidence.patience_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from electra_dist.run.jsonl import Record

State = Literal["finished", "living", "held", "waiting", "stopped", "dead", "not begun"]


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """What is known of a run apart from its ledger. Without Slurm the three fields about jobs stay False."""

    now: float  # Unix seconds
    sign_of_life: float | None  # Unix seconds of the newest heartbeat, metrics record or event; None: never
    patience_s: float  # how long a living run may be silent
    running: bool = False  # one of its jobs runs
    pending: bool = False  # one of its jobs waits in the queue and will start without a person
    held: bool = False  # one of its jobs is held until a person releases it


def run_state(ledger: Sequence[Record], evidence: RunEvidence) -> State:
    """Classify a run by the first of these that decides: "done" in the ledger, queue, last event, sign of life.
    A run is "stopped" on request or for lack of storage, and "dead" after a fault or after too long a silence.
    """
    if any(event["event"] == "done" for event in ledger):
        return "finished"

    # Slurm's queue is right even if the run is silent.
    if evidence.running:
        return "living"
    if evidence.held:
        return "held"
    if evidence.pending:
        return "waiting"

    # No job is known: the ledger and the newest sign of life decide.
    if not ledger and evidence.sign_of_life is None:
        return "not begun"
    last_event = ledger[-1]["event"] if ledger else ""
    if last_event in ("stop", "storage"):
        return "stopped"
    if last_event in ("crash", "unhealthy"):
        return "dead"
    silent_since = evidence.sign_of_life or 0.0  # without any sign of life: since 1970
    if evidence.now - silent_since < evidence.patience_s:
        return "living"
    return "dead"
