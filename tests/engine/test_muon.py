"""Muon equals a float64 computation, resumes exactly, proves at the start that it runs, and is refused elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from support.real_runs import synthetic_rows, tiny_tree
from torch import nn

from electra_dist.config import Config, OptimizerConfig
from electra_dist.engine import foreach_optimizers
from electra_dist.engine.engine import Engine
from electra_dist.engine.foreach_optimizers import ForeachAdamW, ForeachMuon, check_muon
from electra_dist.engine.optimizer import build_optimizer, parameter_groups
from electra_dist.engine.state_fragments import held_fragments
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
LR = 1e-2
DECAY = 0.1


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Return the result of five steps of the quintic iteration, written from its definition, in float64."""
    x = matrix / np.sqrt((matrix**2).sum())
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x


@pytest.mark.parametrize(("rows", "columns", "num_matrices"), [(12, 20, 1), (20, 12, 1), (24, 8, 3)])
def test_six_updates_equal_a_float64_computation(rows: int, columns: int, num_matrices: int) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(rows, columns))
    group = {"params": [parameter], "num_matrices": num_matrices}
    optimizer = ForeachMuon([group], lr=LR, betas=(0.9, 0.999), eps=1e-6, weight_decay=DECAY)
    expected = parameter.detach().double().numpy().copy()
    momentum = np.zeros((rows, columns))
    for _ in range(6):
        parameter.grad = torch.randn(rows, columns)
        gradient = parameter.grad.double().numpy()
        momentum = 0.95 * momentum + 0.05 * gradient
        blend = 0.05 * gradient + 0.95 * momentum
        update = np.concatenate([newton_schulz(part) for part in np.split(blend, num_matrices)])
        scale = 0.2 * np.sqrt(max(rows // num_matrices, columns))
        expected -= LR * (scale * update + DECAY * expected)
        optimizer.step()
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=2e-5)
    assert not optimizer.state[parameter]["exp_avg_sq"].any()


def test_parameters_of_other_groups_get_the_updates_of_adamw_bit_for_bit() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 4)
    both = [nn.Parameter(values.clone()) for _ in range(2)]
    settings = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": DECAY}
    optimizers = [ForeachMuon([both[0]], **settings), ForeachAdamW([both[1]], **settings)]
    for _ in range(3):
        gradient = torch.randn(5, 4)
        for parameter, optimizer in zip(both, optimizers):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(both[0], both[1])


def muon_config(**settings: object) -> Config:
    """Return the config of a tiny run with Muon, one micro-batch of four rows a step."""
    fields = {"optimizer.name": "muon", "engine.zero_stage": 0, "train.global_batch": 4, "train.micro_batch": 4}
    return Config.model_validate(tiny_tree("unused", "unused", **fields, **settings))  # type: ignore[arg-type]


def test_muon_gets_the_matrices_of_the_layers_and_nothing_else() -> None:
    config = muon_config()
    module = build_objective(config.model, config.objective, SPECIAL, 3)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_muon: dict[str, int] = {}
    for group in parameter_groups(module, DECAY, use_muon=True):
        for parameter in group["params"]:
            if "num_matrices" in group:
                by_muon[names[id(parameter)]] = group["num_matrices"]
    expected = {}
    for tower in ("generator", "discriminator"):
        for layer in (0, 1):
            prefix = f"towers.{tower}.layers.{layer}"
            expected |= {f"{prefix}.{part}.weight": 1 for part in ("attention.out", "expand", "contract")}
            expected[f"{prefix}.attention.qkv.weight"] = 3
    assert by_muon == expected


def run_steps(engine: Engine, config: Config, first: int, last: int) -> list[float]:
    """Train the steps from `first` up to `last`, exclusive, on one batch; return the losses."""
    ids = torch.from_numpy(synthetic_rows(4, 5).astype(np.int64))
    scales = 1 / engine.module.loss_counts(ids).sum(0)
    losses = []
    for step in range(first, last):
        out = engine.forward(StepInput(ids, torch.arange(4), step, 11, *scales))
        engine.backward(out.loss)
        engine.step(2e-3)
        losses.append(out.loss.item())
    return losses


def build(config: Config) -> Engine:
    """Return an engine of a new objective."""
    module = build_objective(config.model, config.objective, SPECIAL, 3)
    return Engine(module, config.train, config.engine, config.optimizer)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_with_muon_learns_and_continues_bit_for_bit_from_its_checkpointed_state(precision: str) -> None:
    config = muon_config(**{"train.precision": precision, "optimizer.generator": {"lr": 1e-3}})
    uncut = build(config)
    assert uncut.optimizer_name == "ForeachMuon (electra-dist)"
    first_losses = run_steps(uncut, config, 0, 3)
    saved = {}
    for fragment in held_fragments(uncut):
        saved[fragment.name] = {kind: view.clone() for kind, view in fragment.views.items()}
    expected = run_steps(uncut, config, 3, 12)
    uncut.close()

    resumed = build(config)
    for fragment in held_fragments(resumed):
        for kind, view in fragment.views.items():
            view.copy_(saved[fragment.name][kind])
    resumed.layout.publish()
    assert run_steps(resumed, config, 3, 12) == expected
    resumed.close()
    assert np.mean(expected[-6:]) < np.mean(first_losses)


def test_an_optimizer_whose_update_is_not_orthogonal_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = muon_config()
    module = build_objective(config.model, config.objective, SPECIAL, 3)
    optimizer, _ = build_optimizer(module, config.optimizer, "cpu")
    assert len(optimizer.state) == 0  # the test matrix left no state
    adamw, _ = build_optimizer(module, OptimizerConfig(), "cpu")
    with pytest.raises(RuntimeError, match="no parameter group is updated by Muon"):
        check_muon(adamw)
    monkeypatch.setattr(foreach_optimizers, "orthogonalize", lambda matrix: matrix)
    with pytest.raises(RuntimeError, match="the update of a test matrix has singular values from"):
        check_muon(optimizer)


@pytest.mark.usefixtures("one_rank")
def test_a_refused_step_changes_neither_weights_nor_momenta() -> None:
    config = muon_config()
    engine = build(config)
    run_steps(engine, config, 0, 2)
    held = held_fragments(engine)
    before = {(fragment.name, kind): view.clone() for fragment in held for kind, view in fragment.views.items()}
    ids = torch.from_numpy(synthetic_rows(4, 5).astype(np.int64))
    output = engine.forward(StepInput(ids, torch.arange(4), 2, 11, 1.0, 1.0))
    engine.backward(output.loss)
    _, was_updated = engine.step(2e-3, lambda: False)
    assert not was_updated
    for fragment in held_fragments(engine):
        for kind, view in fragment.views.items():
            assert torch.equal(view, before[fragment.name, kind])
    engine.close()
