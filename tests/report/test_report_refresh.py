"""The report of a run that goes on: written by a process of its own, at intervals, and not after the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from electra_dist.report import tracking
from electra_dist.report.tracking import ReportRefresh
from electra_dist.run.ledger import Ledger


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_report_is_written_at_intervals_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "_NICENESS", 0)  # other tests may use all cores
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    report = tmp_path / "report.html"
    refresh = ReportRefresh(tmp_path, every_minutes=0.5 / 60)

    assert refresh._process is None  # the interval is not over
    wait_until(report.exists)

    assert "under way or cut off" in report.read_text()
    refresh.close()
    ledger.close()


def test_no_report_is_written_with_an_interval_of_0_nor_by_a_process_that_outlives_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The module that stands in for the report sleeps for a minute; `close` must end it."""
    before = threading.active_count()
    ReportRefresh(tmp_path, every_minutes=0).close()
    assert threading.active_count() == before

    sleeper = tmp_path / "sleeping_module.py"
    sleeper.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tracking, "_REPORT_MODULE", "sleeping_module")
    refresh = ReportRefresh(tmp_path, every_minutes=1e-9)
    wait_until(lambda: refresh._process is not None)
    process = refresh._process
    time.sleep(0.2)
    assert process is not None
    assert refresh._process is process  # one at a time

    refresh.close()

    assert process.poll() is not None
    time.sleep(0.2)
    assert refresh._process is process  # none begins after `close`
