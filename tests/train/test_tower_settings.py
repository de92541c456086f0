"""Real runs with settings of single towers (own optimizer settings, joint MLM, frozen generators) repeat exactly."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import step_records

Pretrain = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], list[tuple]]
MakeConfig = Callable[..., Path]

pytestmark = pytest.mark.multiproc

DECOUPLED = {
    "optimizer.generator": {"lr": 5e-4, "warmup_steps": 4, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 0.05},
    "optimizer.clip_norm": 0.5,
    "objective.discriminator_mlm_weight": 1.0,
}


def go_back(run_dir: Path, step: int) -> None:
    """Delete the checkpoints after `step`, so that the next start of the run continues from that step."""
    for folder in (run_dir / "checkpoints").glob("step-*"):
        number = int(folder.name.split("-")[1])  # of "step-00000004-a0001"
        if number > step:
            shutil.rmtree(folder)


def without_norm(records: list[tuple]) -> list[tuple]:
    """Return the records without the gradient norm, whose sum over partitions depends on the number of ranks."""
    return [record[:4] + record[5:] for record in records]


def test_a_cut_run_with_two_optimizer_settings_repeats_bit_for_bit_on_another_number_of_ranks(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    settings = {
        "train.num_steps": 9,
        "train.precision": "bf16",
        "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 9,
    }
    config = tiny_config("run", **settings, **DECOUPLED)
    run_dir = tmp_path / "run"
    pretrain(config, 1)
    expected = losses(run_dir)

    go_back(run_dir, 4)
    pretrain(config, 2)

    assert len(expected) == 9
    assert without_norm(losses(run_dir)) == without_norm(expected)
    records = step_records(run_dir)
    assert [record["generator_lr"] for record in records[:5]] == pytest.approx(
        [5e-4 * min(1, step / 4) * (1 - step / 9) for step in range(5)]
    )
    assert all(record["token_loss"] > 0 for record in records)
