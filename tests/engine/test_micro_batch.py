"""`train.micro_batch: auto`: the most that fit by what was measured, the same after a restart, and the same losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.engine import micro_batch
from electra_dist.engine.micro_batch import with_micro_batch
from electra_dist.errors import UserError
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.objectives.build import build_objective
from electra_dist.run.folder import MICRO_BATCH_FILE

CPU = torch.device("cpu")
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture
def config(tiny_config: Callable[..., Path], tmp_path: Path) -> Config:
    (tmp_path / "run").mkdir()
    return load_config(tiny_config("run", **{"train.global_batch": 24, "train.micro_batch": "auto"}), [])


@pytest.fixture
def module(config: Config) -> Objective:
    return build_objective(config.model, config.objective, SPECIAL, config.seed)


def state_bytes(module: Objective) -> int:
    """fp32 at ZeRO-1 on one rank: weights, gradients, master copy and two moments."""
    return 20 * sum(parameter.numel() for parameter in module.parameters())


def test_auto_is_one_row_until_it_is_found(config: Config) -> None:
    assert config.train.micro_batch == 1 and config.train.largest_micro_batch
    assert Config.model_validate(config.model_dump()) == config
    fixed = config.train.model_copy(update={"micro_batch": 8, "largest_micro_batch": False})
    assert config.model_copy(update={"train": fixed}).identity() == config.identity()


def test_memory_is_a_constant_and_so_much_a_row(config: Config, module: Objective) -> None:
    one, two = micro_batch._measure(config, module, CPU)
    ids_BS = torch.randint(5, config.model.vocab_size, (6, config.data.seq_len))
    ids_BS[:, 0], ids_BS[:, -1] = SPECIAL.cls, SPECIAL.sep
    six = micro_batch._kept_on_cpu(module, StepInput(ids_BS, torch.arange(6), 0, 1, 0.1, 0.1))
    assert 0 < two - one < one
    assert six == pytest.approx(one + 5 * (two - one), rel=0.02)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("rows", "expected"), [(1.5, 1), (2.5, 2), (5.9, 4), (7.0, 6), (100.0, 24)])
def test_the_largest_divisor_that_fits(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch, rows: float, expected: int
) -> None:
    monkeypatch.setattr(micro_batch, "_measure", lambda *_: (3_000_000, 4_000_000))
    free = (state_bytes(module) + 2_000_000 + 1_000_000 * rows) / 0.9
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: free)
    found = with_micro_batch(config, module, CPU).train
    assert (found.micro_batch, found.global_batch, found.largest_micro_batch) == (expected, 24, False)


@pytest.mark.usefixtures("one_rank")
def test_a_restart_takes_what_was_found_whatever_is_free_then(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = with_micro_batch(config, module, CPU).train.micro_batch
    assert first == 24  # a toy
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: 0.0)
    assert with_micro_batch(config, module, CPU).train.micro_batch == first
    assert list(json.loads((Path(config.run_dir) / MICRO_BATCH_FILE).read_text()).values()) == [24]
    (Path(config.run_dir) / MICRO_BATCH_FILE).unlink()
    with pytest.raises(UserError, match="not one row fits"):
        with_micro_batch(config, module, CPU)
