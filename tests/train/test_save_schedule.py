"""When a checkpoint is due: by a fixed interval, by the ledger, and for those kept for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.analysis.save_interval import automatic_steps
from electra_dist.config import CheckpointConfig
from electra_dist.engine.distributed import init_distributed
from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.train.save_schedule import SaveSchedule


@pytest.fixture(autouse=True)
def one_rank() -> None:
    init_distributed()  # or the group of one rank that an earlier test of this process has made


def due_steps(schedule: SaveSchedule, first: int, last: int) -> list[int]:
    steps = []
    for step in range(first, last + 1):
        if schedule.due(step):
            steps.append(step)
            schedule.saved(step)
    return steps


def test_a_fixed_interval_is_by_the_step_number_and_what_is_kept_for_ever_is_saved(tmp_path: Path) -> None:
    schedule = SaveSchedule(CheckpointConfig(every_steps=20, keep_every_steps=50, keep_steps=(33,)), tmp_path, 13)
    assert due_steps(schedule, 14, 100) == [20, 33, 40, 50, 60, 80, 100]
    assert not schedule.saved(100)


def test_the_automatic_interval_begins_at_the_restored_step_and_follows_the_ledger(tmp_path: Path) -> None:
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
