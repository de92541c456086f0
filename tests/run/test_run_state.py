"""Classification of a run's state from its ledger, its newest sign of life and its jobs in Slurm's queue."""

from __future__ import annotations

from typing import Any

import pytest
from support.run_records import ledger_event

from electra_dist.run.history import RunEvidence, run_state


def evidence(**fields: Any) -> RunEvidence:
    """Return the evidence at time 100 of a run that may be silent for 30 s; no sign of life and no job by default."""
    return RunEvidence(**{"now": 100.0, "sign_of_life": None, "patience_s": 30.0, **fields})


@pytest.mark.parametrize(
    ("last_event", "evidence_fields", "state"),
    [
        # A running job, or a sign of life in the last 30 s, shows that the run lives.
        ("checkpoint", {"running": True}, "living"),
        ("checkpoint", {"sign_of_life": 95.0}, "living"),
        ("checkpoint", {"sign_of_life": 60.0}, "dead"),
        # The queue has precedence over the sign of life.
        ("checkpoint", {"sign_of_life": 60.0, "running": True}, "living"),
        ("checkpoint", {"sign_of_life": 60.0, "pending": True}, "waiting"),
        ("checkpoint", {"sign_of_life": 60.0, "held": True}, "held"),
        # The ledger records how the run ended.
        ("stop", {"sign_of_life": 99.0}, "stopped"),
        ("stop", {"sign_of_life": 99.0, "pending": True}, "waiting"),
        ("crash", {"sign_of_life": 99.0}, "dead"),
        ("unhealthy", {"sign_of_life": 99.0}, "dead"),
        ("done", {"sign_of_life": 0.0, "pending": True}, "finished"),
    ],
)
def test_the_state_of_a_run_follows_from_its_last_event_its_sign_of_life_and_its_jobs(
    last_event: str, evidence_fields: dict[str, Any], state: str
):
    ledger = [ledger_event("start"), ledger_event(last_event, 5)]

    assert run_state(ledger, evidence(**evidence_fields)) == state


def test_a_run_without_any_event_is_waiting_if_a_job_is_pending_and_otherwise_not_begun():
    assert run_state([], evidence(pending=True)) == "waiting"
    assert run_state([], evidence()) == "not begun"
