"""When a checkpoint is due: at a fixed interval, at one derived from the ledger, and at steps that are always kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from electra_dist.config import CheckpointConfig
from electra_dist.engine.process_group import init_distributed
from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.train.checkpointer import SaveSchedule, automatic_steps


@pytest.fixture(autouse=True)
def one_rank() -> None:
    """A process group of one rank, new or made by an earlier test of this process."""
    init_distributed()


def due_steps(schedule: SaveSchedule, first: int, last: int) -> list[int]:
    """Return the steps from `first` to `last` at which a checkpoint is due, reporting each as saved."""
    steps = []
    for step in range(first, last + 1):
        if schedule.due(step):
            steps.append(step)
            schedule.saved(step)
    return steps


def test_a_checkpoint_is_due_at_multiples_of_the_fixed_interval_and_at_steps_to_keep(tmp_path: Path) -> None:
    schedule = SaveSchedule(CheckpointConfig(every_steps=20, keep_every_steps=50, keep_steps=(33,)), tmp_path, 13)
    assert due_steps(schedule, 14, 100) == [20, 33, 40, 50, 60, 80, 100]
    assert not schedule.saved(100)


def test_the_automatic_interval_starts_at_the_restored_step_and_follows_the_ledger(tmp_path: Path) -> None:
    config = CheckpointConfig(every_steps="auto", keep_every_steps=250)
    schedule = SaveSchedule(config, tmp_path, 30)
    assert schedule.every_steps == 100
    assert due_steps(schedule, 31, 260) == [130, 230, 250]
    ledger = Ledger(tmp_path)
    ledger.append("start", 0)
    spent = {"first": 1.0, "step": 399.0, "data": 0.0}
    ledger.append("checkpoint", 400, stall_s=0.5, wait_s=0.0, spent_s=spent)
    assert schedule.saved(400)
    assert schedule.every_steps == automatic_steps(read_ledger(tmp_path)) != 100
    assert not schedule.due(400 + schedule.every_steps - 1) or (400 + schedule.every_steps - 1) % 250 == 0
    assert schedule.due(400 + schedule.every_steps)


@pytest.mark.parametrize("keep_steps", [(), (33,), (7, 8)])
@pytest.mark.parametrize("keep_every_steps", [0, 6, 50])
@pytest.mark.parametrize("every_steps", [1, 20, "auto"])
def test_the_next_step_with_a_checkpoint_is_the_first_at_which_one_is_due(
    tmp_path: Path, every_steps: Any, keep_every_steps: int, keep_steps: tuple[int, ...]
) -> None:
    config = CheckpointConfig(every_steps=every_steps, keep_every_steps=keep_every_steps, keep_steps=keep_steps)
    schedule = SaveSchedule(config, tmp_path, 5)
    kept = {*keep_steps, *(range(0, 1000, keep_every_steps) if keep_every_steps else ())}
    by_interval = range(5 + 100, 1000) if every_steps == "auto" else range(0, 1000, every_steps)
    due = sorted({*kept, *by_interval})
    for step in range(5, 120):
        assert schedule.due(step) == (step in due)
        assert schedule.next_due(step) == next(later for later in due if later > step)


def test_the_next_step_with_a_checkpoint_may_be_far_away(tmp_path: Path) -> None:
    schedule = SaveSchedule(CheckpointConfig(every_steps=10**12), tmp_path, 0)
    assert schedule.next_due(3) == 10**12
