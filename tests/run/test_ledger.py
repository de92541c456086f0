"""The ledger of a run: its events are in order and on the disk, and a torn last line is dropped."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from electra_dist.run.folder import LEDGER_FILE
from electra_dist.run.history import newest_checkpoint
from electra_dist.run.ledger import Ledger, LedgerEvent, has_event, read_ledger
from electra_dist.store.patience import Patience


def test_events_of_two_starts_are_read_in_order_with_their_details_and_utc_times(tmp_path: Path):
    before = datetime.now(UTC) - timedelta(seconds=1)

    first_start = Ledger(tmp_path)
    first_start.append("start", 0, ranks=2, host="a")
    first_start.append("checkpoint", 100, stall_s=0.25)
    first_start.close()
    second_start = Ledger(tmp_path)
    second_start.append("resume", 100)
    second_start.close()

    events = read_ledger(tmp_path)
    assert [event.event for event in events] == ["start", "checkpoint", "resume"]
    assert [event.step for event in events] == [0, 100, 100]
    assert events[0].ranks == 2
    assert events[1].stall_s == 0.25
    times = [datetime.fromisoformat(event.time) for event in events]
    assert before <= times[0] <= times[1] <= times[2] <= datetime.now(UTC)


def test_an_event_is_in_the_file_when_it_is_synced_to_the_disk_by_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    contents_at_sync: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda fd: contents_at_sync.append((tmp_path / LEDGER_FILE).read_bytes()))
    ledger = Ledger(tmp_path)

    ledger.append("start", 0)

    assert contents_at_sync, "append does not call fsync"
    assert b'"start"' in contents_at_sync[-1]
    ledger.close()


def test_a_torn_last_event_is_dropped_and_a_missing_ledger_has_no_events(tmp_path: Path):
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    ledger.close()
    with open(tmp_path / LEDGER_FILE, "ab") as file:
        file.write(b'{"time": "2026-')

    events = read_ledger(tmp_path)

    assert [event.event for event in events] == ["start"]
    assert read_ledger(tmp_path / "elsewhere") == []


def test_an_event_is_found_by_its_kind_and_step(tmp_path: Path):
    assert not has_event(tmp_path, "rollback", 5)
    ledger = Ledger(tmp_path)
    ledger.append("stopped_step", 5, fault="spike")
    ledger.append("rollback", 6, skip_from=4, skip_to=6)
    ledger.close()

    assert has_event(tmp_path, "rollback", 6)
    assert not has_event(tmp_path, "rollback", 5)
    assert not has_event(tmp_path, "stopped_step", 6)


def test_a_resume_proves_the_checkpoint_that_a_killed_start_has_not_recorded():
    names = {"start": 0, "checkpoint": 4, "resume": 8}
    ledger = [LedgerEvent(time="2026-01-01", event=name, step=step) for name, step in names.items()]

    assert newest_checkpoint(ledger) == 8


def test_an_event_that_the_disk_refuses_is_waited_for_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk is full until the ledger waits for it; an event that is not waited for comes with the next one."""
    write = os.write
    is_full = True

    def refuse(descriptor: int, data: bytes) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    def free_space(reason: str) -> None:
        nonlocal is_full
        is_full = False

    patience = Patience(60.0, note=lambda line: None)
    patience.reporter.on_wait = free_space
    ledger = Ledger(tmp_path, patience)
    monkeypatch.setattr(os, "write", refuse)

    ledger.append_soon("stopped_step", 4)
    assert read_ledger(tmp_path) == []
    ledger.append("checkpoint", 5)
    ledger.append_once("checkpoint", 5)
    ledger.close()

    assert [(event.event, event.step) for event in read_ledger(tmp_path)] == [("stopped_step", 4), ("checkpoint", 5)]
