"""LAMB equals a float64 transcription of its algorithm, learns in the engine, and is refused where it cannot run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from support.real_runs import tiny_tree
from torch import nn

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.foreach_optimizers import ForeachLamb
from electra_dist.engine.optimizer import build_optimizer
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.state_fragments import held_fragments
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

CONFIGS = Path(__file__).parents[2] / "configs"


def test_ten_updates_equal_a_float64_transcription() -> None:
    """Two parameters have weight decay and a trust ratio of their own; the third has no decay and no ratio."""
    torch.manual_seed(0)
    shapes, decays = [(7, 5), (11,), (6,)], [0.01, 0.01, 0.0]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups = [{"params": params[:2], "weight_decay": 0.01}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = ForeachLamb(groups, lr=1e-2, betas=(0.878, 0.974), eps=1e-6, weight_decay=0.01)
    truth = [p.detach().double().numpy().copy() for p in params]
    m, v = ([np.zeros(shape) for shape in shapes] for _ in range(2))
    for _ in range(10):
        for i, p in enumerate(params):
            p.grad = torch.randn(shapes[i]) * 10.0**-i
            g = p.grad.double().numpy()
            m[i], v[i] = 0.878 * m[i] + 0.122 * g, 0.974 * v[i] + 0.026 * g**2
            r = m[i] / (np.sqrt(v[i]) + 1e-6) + decays[i] * truth[i]
            ratio = np.sqrt((truth[i] ** 2).sum()) / np.sqrt((r**2).sum()) if decays[i] else 1.0
            truth[i] -= 1e-2 * ratio * r
        optimizer.step()
    for p, expected in zip(params, truth):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=2e-6)
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    np.testing.assert_allclose(optimizer.state[params[1]]["exp_avg_sq"].numpy(), v[1], rtol=1e-5)


def test_the_updates_norm_is_lr_times_the_parameters_norm_for_any_gradient_scale() -> None:
    """A parameter of norm 0 gets the update without the trust ratio."""
    for scale in (1e-4, 1e4):
        p, zero = nn.Parameter(torch.full((20,), 3.0)), nn.Parameter(torch.zeros(20))
        optimizer = ForeachLamb([p, zero], lr=0.01, betas=(0.0, 0.0), eps=1e-12, weight_decay=1e-9)
        p.grad = zero.grad = torch.randn(20, generator=torch.Generator().manual_seed(1)) * scale
        optimizer.step()
        assert (p.detach() - 3).norm().item() == pytest.approx(0.01 * 3 * 20**0.5, rel=1e-4)
        assert zero.detach().norm().item() == pytest.approx(0.01 * 20**0.5, rel=1e-4)


def test_zero_parameter_with_zero_gradient_stays_zero_at_lr_zero() -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.zeros(4)
    ForeachLamb([p], lr=0.0, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01).step()
    assert not p.any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_engine_learns_with_lamb_and_its_fragments_hold_both_moments(precision: str) -> None:
    init_distributed()
    settings = {"optimizer.name": "lamb", "engine.zero_stage": 0, "train.precision": precision}
    config = Config.model_validate(tiny_tree("unused", "unused", **settings))
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    engine = Engine(
        build_objective(config.model, config.objective, special, 3), config.train, config.engine, config.optimizer
    )
    assert engine.optimizer_name == "ForeachLamb (electra-dist)"
    ids = torch.randint(5, 300, (8, 32), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = special.cls
    ids[:, 31] = special.sep
    losses = []
    for step in range(20):
        step_input = StepInput(ids, torch.arange(8), step % 2, 1, 1 / 64, 1 / 256)
        out = engine.forward(step_input)
        engine.backward(out.loss / 2)  # a step has two micro-batches, which are equal in this test
        out = engine.forward(step_input)
        engine.backward(out.loss / 2)
        engine.step(3e-3)
        losses.append(out.loss.item())
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    fragments = held_fragments(engine)
    engine.close()
    assert all(set(f.views) == {"master", "exp_avg", "exp_avg_sq"} for f in fragments)
    assert sum(bool(f.views["exp_avg_sq"].any()) for f in fragments) == len(fragments)


@pytest.mark.parametrize(("phase", "length", "rows"), [(1, 128, 67_584), (2, 512, 27_648)])
def test_the_two_phase_configs_have_the_lengths_batches_and_optimizer_of_the_recipe(
    phase: int, length: int, rows: int
) -> None:
    config = load_config(CONFIGS / f"base_size_lamb_phase{phase}.yaml")
    assert (config.data.seq_len, config.train.global_batch, config.train.precision) == (length, rows, "bf16")
    optimizer, name = build_optimizer(nn.Linear(2, 2), config.optimizer, "cpu")
    assert name == "ForeachLamb (electra-dist)"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
