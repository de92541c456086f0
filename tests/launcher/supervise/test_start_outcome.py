"""The outcome of a start: its exit code, and when the supervisor waits for the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from electra_launcher.supervise.start_outcome import StartEnd, awaits_ledger, outcome
from support.run_records import ledger_event


def end(*events: str, **fields: Any) -> StartEnd:
    """Return the end of a start of two ranks with these events in the ledger; `fields` replace the defaults."""
    ledger = [ledger_event(event, 7, why="SIGUSR1") for event in events]
    return StartEnd(events=ledger, **{"codes": {}, "num_ranks": 2, **fields})


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (end("resume", "checkpoint", "done", codes={0: 0, 1: 0}), 0),
        (end("resume", "done"), 0),  # killed after the last checkpoint was committed
        (end("start", codes={0: 0, 1: 0}), 1),  # exit codes without `done` in the ledger are not trusted
        (end("start", "stop", codes={0: 75, 1: 75}), 75),
        (end("start", "stop", codes={0: 75}), 75),
        (end("start", "storage", codes={0: 75, 1: 75}), 75),
        (end("start", codes={0: 75, 1: 75}), 75),  # the disk of the ledger refused the event
        (end("start", codes={0: 75, 1: 0}), 1),
        (end("start", "storage", codes={0: 75}), 75),  # rank 1 hung in a collective and was killed
        (end("start", "crash", codes={0: 1}), 1),
        (end("start"), 1),
        (end(), 1),
        (end(codes={0: 78, 1: 78}), 78),
        (end("start", codes={1: 78}), 78),  # the user must act, and the other rank was killed
        (end("start", "unhealthy", codes={0: 69, 1: 69}), 69),
        (end("start", "unhealthy", codes={0: 69, 1: 69}, at_fault=False), 75),
        (end("start", codes={0: -9, 1: 75}), 1),
        (end("start", codes={0: 127, 1: 127}), 1),
    ],
)
def test_exit_code_follows_from_the_ledger_and_the_ranks_exit_codes(ended: StartEnd, code: int) -> None:
    assert outcome(ended).code == code


def test_the_ledger_is_awaited_only_if_all_ranks_ended_with_0_or_75() -> None:
    assert awaits_ledger(end("start", codes={0: 0, 1: 0}))
    assert awaits_ledger(end(codes={0: 75, 1: 75}))
    assert not awaits_ledger(end("start", codes={0: 0}))
    assert not awaits_ledger(end("start", codes={0: 0, 1: 1}))
    assert not awaits_ledger(end("start", "done", codes={0: 0, 1: 0}))


def test_a_crash_names_how_each_rank_has_ended() -> None:
    crash = outcome(end("start", codes={0: -9, 2: 1, 3: -37}, num_ranks=5))
    assert crash.why == "crash: rank 0 SIGKILL, rank 2 exit 1, rank 3 signal 37, 2 did not end"


def test_only_an_end_that_the_ranks_of_other_nodes_cannot_know_of_ends_them() -> None:
    """Ranks that stop together save for different times, so a node that has stopped must not end another."""
    stopped = {0: 75, 1: 75}
    assert not outcome(end("start", "stop", codes=stopped)).ends_others
    assert not outcome(end("start", "storage", codes=stopped)).ends_others
    assert not outcome(end("start", "done", codes={0: 0, 1: 0})).ends_others
    assert outcome(end(codes=stopped)).ends_others  # their storage was away before the training had begun
    assert outcome(end("start", codes={0: 1})).ends_others
    assert outcome(end(codes={0: 78, 1: 78})).ends_others
    assert outcome(end("unhealthy", codes={0: 69, 1: 69}, at_fault=False)).ends_others is False
