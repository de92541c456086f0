"""`train.micro_batch: auto` chooses the largest micro-batch that fits the measured memory and keeps it on restarts."""

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
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.objectives.build_objective import build_objective
from electra_dist.run.folder import MICRO_BATCH_FILE

CPU = torch.device("cpu")
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture
def config(tiny_config: Callable[..., Path], tmp_path: Path) -> Config:
    """The config of a tiny run with 24 rows a step and an automatic micro-batch."""
    (tmp_path / "run").mkdir()
    return load_config(tiny_config("run", **{"train.global_batch": 24, "train.micro_batch": "auto"}), [])


@pytest.fixture
def module(config: Config) -> Objective:
    """The objective of that run."""
    return build_objective(config.model, config.objective, SPECIAL, config.seed)


def state_bytes(module: Objective) -> int:
    """Return the bytes of weights, gradients, master copy and two moments: fp32, ZeRO-1, one rank."""
    return 20 * sum(parameter.numel() for parameter in module.parameters())


def test_auto_is_one_row_until_it_is_measured_and_does_not_change_the_runs_identity(config: Config) -> None:
    assert config.train.micro_batch == 1 and config.train.largest_micro_batch
    assert Config.model_validate(config.model_dump()) == config
    fixed = config.train.model_copy(update={"micro_batch": 8, "largest_micro_batch": False})
    assert config.model_copy(update={"train": fixed}).identity() == config.identity()


def test_memory_is_a_constant_plus_an_amount_for_each_row(config: Config, module: Objective) -> None:
    one, two = micro_batch._measure(config, module, CPU)
    ids_BS = torch.randint(5, config.model.vocab_size, (6, config.data.seq_len))
    ids_BS[:, 0], ids_BS[:, -1] = SPECIAL.cls, SPECIAL.sep
    six = micro_batch._kept_on_cpu(module, StepInput(ids_BS, torch.arange(6), 0, 1, 0.1, 0.1))
    assert 0 < two - one < one
    assert six == pytest.approx(one + 5 * (two - one), rel=0.02)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("rows", "expected"), [(1.5, 1), (2.5, 2), (5.9, 4), (7.0, 6), (100.0, 24)])
def test_auto_is_the_largest_divisor_of_the_batch_that_fits(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch, rows: float, expected: int
) -> None:
    monkeypatch.setattr(micro_batch, "_measure", lambda *_: (3_000_000, 4_000_000))
    free = (state_bytes(module) + 2_000_000 + 1_000_000 * rows) / 0.9
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: free)
    train = with_micro_batch(config, module, CPU).train
    assert (train.micro_batch, train.global_batch, train.largest_micro_batch) == (expected, 24, False)


@pytest.mark.usefixtures("one_rank")
def test_a_restart_uses_the_stored_micro_batch_whatever_memory_is_free(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = with_micro_batch(config, module, CPU).train.micro_batch
    assert first == 24  # the whole batch of so small a model fits
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: 0.0)
    assert with_micro_batch(config, module, CPU).train.micro_batch == first
    assert list(json.loads((Path(config.run_dir) / MICRO_BATCH_FILE).read_text()).values()) == [24]
    (Path(config.run_dir) / MICRO_BATCH_FILE).unlink()
    with pytest.raises(UserError, match="not one row fits"):
        with_micro_batch(config, module, CPU)
