"""The one word for where a run stands, from its ledger, its newest sign of life and its jobs."""

from __future__ import annotations

from typing import Any

import pytest

from electra_dist.analysis.run_classification import RunEvidence, run_state

START = {"event": "start", "step": 0}


@pytest.mark.parametrize(
    ("ending", "evidence", "state"),
    [
        ("checkpoint", {"running": True}, "living"),
        ("checkpoint", {"sign_of_life": 95.0}, "living"),
        ("checkpoint", {"sign_of_life": 60.0}, "dead"),
        ("checkpoint", {"sign_of_life": 60.0, "running": True}, "living"),
        ("checkpoint", {"sign_of_life": 60.0, "pending": True}, "waiting"),
        ("checkpoint", {"sign_of_life": 60.0, "held": True}, "held"),
        ("stop", {"sign_of_life": 99.0}, "stopped"),
        ("stop", {"sign_of_life": 99.0, "pending": True}, "waiting"),
        ("crash", {"sign_of_life": 99.0}, "dead"),
        ("unhealthy", {"sign_of_life": 99.0}, "dead"),
        ("done", {"sign_of_life": 0.0, "pending": True}, "finished"),
    ],
)
def test_the_one_word(ending: str, evidence: dict[str, Any], state: str):
    seen = RunEvidence(**{"now": 100.0, "sign_of_life": None, "patience_s": 30.0, **evidence})
    assert run_state([START, {"event": ending, "step": 5}], seen) == state


def test_a_run_that_was_submitted_and_has_not_begun():
    nothing = {"now": 100.0, "sign_of_life": None, "patience_s": 30.0}
    assert run_state([], RunEvidence(**nothing, pending=True)) == "waiting"
    assert run_state([], RunEvidence(**nothing)) == "not begun"
