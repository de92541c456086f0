"""When a checkpoint is due: at a fixed interval, at one derived from the ledger, and at steps that are always kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.analysis.optimal_save_interval import automatic_steps
from electra_dist.config import CheckpointConfig
from electra_dist.engine.process_group import init_distributed
from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.train.saving.save_schedule import SaveSchedule


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
