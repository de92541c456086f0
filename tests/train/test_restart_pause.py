"""The pause before a start that follows one which lost its storage, and the event that it follows from."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.run_records import ledger_event

from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.train.run import PAUSE_S, record_lost_storage, remaining_pause_s

LOST_AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
LOST = ledger_event("storage", 7, time=LOST_AT.isoformat())


@pytest.mark.parametrize(
    ("age_s", "pause_s"),
    [(0.0, 600.0), (599.0, 1.0), (600.0, 0.0), (86_400.0, 0.0), (-3600.0, 600.0)],  # the last: a clock was set back
)
def test_a_start_waits_until_ten_minutes_after_the_loss(age_s: float, pause_s: float) -> None:
    assert PAUSE_S == 600.0
    assert remaining_pause_s([ledger_event("start"), LOST], LOST_AT.timestamp() + age_s) == pause_s


@pytest.mark.parametrize("last", ["resume", "stop", "crash", "checkpoint"])
def test_no_other_end_makes_a_start_wait(last: str) -> None:
    now = LOST_AT.timestamp()
    assert remaining_pause_s([], now) == 0.0
    assert remaining_pause_s([LOST, ledger_event(last, 8, time=LOST.time)], now) == 0.0


def test_the_loss_is_recorded_once_and_only_in_a_run_folder(tmp_path: Path) -> None:
    record_lost_storage(tmp_path, "disk full")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.yaml").write_text("")
    ledger = Ledger(tmp_path)
    ledger.append("checkpoint", 5)
    ledger.close()
    record_lost_storage(tmp_path, "disk full")
    record_lost_storage(tmp_path, "disk full")
    events = [(event.event, event.step, event.why) for event in read_ledger(tmp_path)]
    assert events == [("checkpoint", 5, ""), ("storage", 5, "disk full")]
