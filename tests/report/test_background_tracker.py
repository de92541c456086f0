"""A tracking service in the background: it receives everything, and its failures and delays stay away from the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest

from electra_dist.report import tracking
from electra_dist.report.tracking import BackgroundTracker


class MemoryService:
    """Service that keeps what it receives, and fails at the step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.received: list[tuple[int, dict[str, float]]] = []
        self.closed_with: list[bool] = []
        self.fails_at = fails_at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server said no\nwith details in a second line")
        self.received.append((step, dict(values)))

    def close(self, has_failed: bool) -> None:
        self.closed_with.append(has_failed)


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_service_receives_all_values_in_order_and_how_the_run_ended(has_failed: bool):
    service = MemoryService()
    tracker = BackgroundTracker("log.test", lambda: service)

    for step in range(100):
        tracker.log(step, {"loss": step / 7})
    tracker.close(has_failed)

    assert service.received == [(step, {"loss": step / 7}) for step in range(100)]
    assert service.closed_with == [has_failed]
    assert tracker.problems() == []


def test_a_service_that_fails_is_dropped_with_one_line():
    service = MemoryService(fails_at=3)
    tracker = BackgroundTracker("log.test", lambda: service)

    for step in range(10):
        tracker.log(step, {})
    tracker.close(has_failed=False)

    assert [step for step, _values in service.received] == [0, 1, 2]
    (line,) = tracker.problems()
    assert line.startswith(
        "log.test: no longer sent to, because of ConnectionError: the server said no; training goes"
    )
    assert tracker.problems() == []  # each line once


def test_a_missing_package_is_one_line_that_says_what_to_install():
    def connect() -> MemoryService:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    tracker = BackgroundTracker("log.wandb", connect)
    tracker.close(has_failed=False)

    (line,) = tracker.problems()
    assert "the package wandb is not installed (pip install wandb)" in line


def test_a_service_that_hangs_delays_no_step_and_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """The connection does not come about until the end of the test. 1,000 records may wait for it, no more."""
    monkeypatch.setattr(tracking, "_CLOSE_S", 0.2)
    end_of_test = threading.Event()

    def connect() -> MemoryService:
        end_of_test.wait()
        return MemoryService()

    tracker = BackgroundTracker("log.test", connect)
    for step in range(1001):
        tracker.log(step, {})  # a wait for the service here would have no end
    lines = tracker.problems()
    tracker.close(has_failed=False)
    end_of_test.set()

    assert len(lines) == 1
    assert "because it is 1,000 records behind" in lines[0]
    assert tracker.problems() == []


def test_closing_waits_for_a_hanging_service_for_a_limited_time_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "_CLOSE_S", 0.2)
    end_of_test = threading.Event()

    def connect() -> MemoryService:
        end_of_test.wait()
        return MemoryService()

    tracker = BackgroundTracker("log.test", connect)
    begin = time.monotonic()
    tracker.close(has_failed=False)
    close_s = time.monotonic() - begin
    end_of_test.set()

    assert close_s >= 0.2
    (line,) = tracker.problems()
    assert "did not take the last records" in line
