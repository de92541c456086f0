"""Who starts a run, who waits for it, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from electra_dist.compare import pretraining_runs
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_plan import Cell, make_plan
from electra_dist.compare.pretraining_runs import pretrain
from electra_dist.config_file import load_section


@pytest.fixture
def cell(make_comparison: Callable[..., Path]) -> Cell:
    file = make_comparison()
    return make_plan(load_section(file, CompareConfig), file).cells[0]


def pretend(monkeypatch: pytest.MonkeyPatch, saved: list[set[int]], at_work: list[list[int]]) -> list[str]:
    """What each look at the checkpoints and at the processes finds; returns the list of starts to come."""
    started: list[str] = []
    saved_now: Iterator[set[int]] = iter(saved)
    at_work_now = iter(at_work)
    monkeypatch.setattr(pretraining_runs, "saved_steps", lambda cell: next(saved_now))
    monkeypatch.setattr(pretraining_runs, "marked_pids", lambda mark: next(at_work_now))
    monkeypatch.setattr(pretraining_runs, "_supervise", lambda cell, ranks, look: (started.append(cell.name), 1)[1])
    return started


def test_a_finished_run_is_not_started(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    started = pretend(monkeypatch, [{4, 8}], [])
    assert pretrain(cell, 1, lambda: None) == "" and started == []


def test_a_run_that_somebody_left_at_work_is_waited_for(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    started = pretend(monkeypatch, [set(), {4}, {4, 8}], [[123], [123]])
    assert pretrain(cell, 1, lambda: pauses.append(1)) == ""
    assert started == [] and len(pauses) == 2


def test_a_run_that_ends_early_is_started_once_and_named_with_its_last_error(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Path(f"{cell.config.run_dir}.log")
    log.parent.mkdir(parents=True)
    log.write_text("a line\nerror: the disk is full\nsupervise: end, exit code 1\n")
    started = pretend(monkeypatch, [set(), {4}], [[], []])
    expected = "the run ended with exit code 1: error: the disk is full; "
    expected += f"read {log}, correct the cause and repeat the command"
    assert pretrain(cell, 1, lambda: None) == expected
    assert started == [cell.name]
