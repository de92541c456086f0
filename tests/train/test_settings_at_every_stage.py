"""Scheduled values, a generator with its own optimizer settings, and a frozen generator resume exactly at every stage.

Each run is cut at several steps and resumed with the same number of ranks: ZeRO 0 to 3 on one and on two ranks, with
AdamW. Muon, which runs at ZeRO 0 only as LAMB does, is cut in test_tower_settings.py. That another number
of ranks gives the same losses at ZeRO 1 in bf16 is shown by test_scheduled_runs.py and test_tower_settings.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.real_runs import go_back, step_records

Pretrain = Callable[..., subprocess.CompletedProcess[str]]
MakeConfig = Callable[..., Path]

pytestmark = [pytest.mark.drill, pytest.mark.multiproc]

NUM_STEPS = 9
CUTS = (3, 6)  # at 3 all values change and the generator's learning rate rises; between 5 and 6 rtd_weight jumps
RUN = {
    "train.num_steps": NUM_STEPS,
    "train.precision": "bf16",
    "model.hidden_dropout": 0.1,
    "guard.spike_sigma": 30,
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": NUM_STEPS,
}
SCHEDULES = {
    "objective.temperature": {"from": 4, "to": 1, "shape": "exponential", "tau": 0.15},
    "objective.mask_prob": {"from": 0.3, "to": 0.15, "shape": "linear"},
    "objective.rtd_weight": {"from": 10, "to": 50, "shape": "step", "over": 0.6},
    "objective.random_share": {"from": 1, "to": 0, "shape": "cosine", "over": 0.6},
}
OWN_OPTIMIZER = {
    "optimizer.generator": {"lr": 5e-4, "warmup_steps": 4, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 0.05},
    "optimizer.clip_norm": 0.5,
}
SMALL_TOWER = {"hidden_size": 16, "num_layers": 2, "num_heads": 1, "intermediate_size": 32}
# Fields of a record that depend on time, memory or the machine.
MEASURED = {"tokens_per_s", "data_wait", "memory_gb", "eta_s", "step_s", "slow_ranks", "mfu"}


def exact_records(run_dir: Path) -> list[dict]:
    """Return the step records of a run, with losses and scheduled values, without what is measured."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in step_records(run_dir)]


def assert_cuts_change_nothing(
    pretrain: Pretrain, config: Path, run_dir: Path, ranks: int, cuts: Sequence[int]
) -> list[dict]:
    """Run without a cut, then continue from the checkpoint of each cut; return the records, equal each time."""
    pretrain(config, ranks)
    uncut = exact_records(run_dir)
    assert len(uncut) == NUM_STEPS
    for cut in cuts:
        go_back(run_dir, cut)
        assert f"restored step {cut}" in pretrain(config, ranks).stdout
        assert exact_records(run_dir) == uncut
    return uncut


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_schedules_and_a_generator_with_its_own_optimizer_resume_exactly(
    stage: int, ranks: int, tiny_config: MakeConfig, pretrain: Pretrain, tmp_path: Path
) -> None:
    config = tiny_config("run", **RUN, **SCHEDULES, **OWN_OPTIMIZER, **{"engine.zero_stage": stage})
    records = assert_cuts_change_nothing(pretrain, config, tmp_path / "run", ranks, CUTS)
    for key in ("temperature", "mask_prob", "rtd_weight", "random_share", "generator_lr"):
        assert len({record[key] for record in records}) > 1, key


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the run whose large tower is the frozen generator; the first test makes that run."""
    return tmp_path_factory.mktemp("source") / "run"


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 1), (1, 2), (2, 2), (3, 2)])
def test_a_frozen_generator_with_schedules_resumes_exactly(
    stage: int, ranks: int, source_folder: Path, tiny_config: MakeConfig, pretrain: Pretrain, tmp_path: Path
) -> None:
    if not source_folder.exists():
        mlm = {"objective.name": "mlm", "model.discriminator": SMALL_TOWER, "train.num_steps": 4, "data.heldout": None}
        pretrain(tiny_config(str(source_folder), **mlm), 1)
    frozen = {
        "objective.generator": "frozen",
        "train.init_generator_from": str(source_folder),
        "engine.zero_stage": stage,
    }
    config = tiny_config("run", **RUN, **SCHEDULES, **frozen)
    assert_cuts_change_nothing(pretrain, config, tmp_path / "run", ranks, CUTS[-1:])
