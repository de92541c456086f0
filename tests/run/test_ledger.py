"""The ledger is durable, ordered, and survives a torn line."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from electra_dist.run.folder import LEDGER_FILE
from electra_dist.run.ledger import Ledger, read_ledger


def test_events_in_order_with_details_and_utc_time(tmp_path: Path):
    before = datetime.now(UTC) - timedelta(seconds=1)
    ledger = Ledger(tmp_path)
    ledger.append("start", 0, world_size=2, host="a")
    ledger.append("checkpoint", 100, stall_s=0.25)
    ledger.close()
    again = Ledger(tmp_path)
    again.append("resume", 100)
    again.close()
    events = read_ledger(tmp_path)
    assert [(e["event"], e["step"]) for e in events] == [("start", 0), ("checkpoint", 100), ("resume", 100)]
    assert events[0]["world_size"] == 2
    assert events[1]["stall_s"] == 0.25
    times = [datetime.fromisoformat(e["time"]) for e in events]
    assert before <= times[0] <= times[1] <= times[2] <= datetime.now(UTC)


def test_an_event_is_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((tmp_path / LEDGER_FILE).read_bytes()))
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    assert synced
    assert b'"start"' in synced[-1]
    ledger.close()


def test_a_torn_event_is_dropped(tmp_path: Path):
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    ledger.close()
    with open(tmp_path / LEDGER_FILE, "ab") as file:
        file.write(b'{"time": "2026-')
    assert [e["event"] for e in read_ledger(tmp_path / LEDGER_FILE)] == ["start"]
    assert read_ledger(tmp_path / "elsewhere") == []
