"""Settings of the generator's own in the optimizer: their parameters, learning rates, norms and identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_kernels.operation_types import SpecialIds
from support.rank_processes import finish_ranks, start_ranks

from electra_dist.config import Config, ObjectiveConfig, OptimizerConfig
from electra_dist.config.load import load_config
from electra_dist.engine.optimizer import parameter_groups
from electra_dist.errors import UserError
from electra_dist.objectives.build_objective import build_objective

WORKER = Path(__file__).parent / "tower_clipping_worker.py"
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
# A weight of 1 and a learning rate of 5e-4: fp32 rounds the weight by 6e-8, which is 1.2e-4 learning rates.
FP32_ROUNDING = 2e-4


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("num_ranks", "sharing"),
    [
        pytest.param(2, "embeddings", marks=pytest.mark.sample),
        pytest.param(1, "gdes", marks=pytest.mark.drill),
    ],
)
def test_an_update_with_two_norms_is_that_of_a_float64_computation_at_every_stage(
    num_ranks: int, sharing: str
) -> None:
    output = finish_ranks(start_ranks(WORKER, num_ranks, sharing))
    for lines in output:
        measured = [line.split() for line in lines.splitlines() if line.startswith("MEASURED")]
        assert len(measured) == 15
        assert all(float(fields[-1]) < FP32_ROUNDING for fields in measured), measured


@pytest.mark.parametrize(
    ("sharing", "name", "owns_embeddings"),
    [("embeddings", "rtd", False), ("none", "rtd", True), ("gdes", "adversarial", True), ("none", "electric", True)],
)
def test_the_generators_groups_hold_what_only_the_generator_uses(
    tiny_config: Callable[..., Path], sharing: str, name: Any, owns_embeddings: bool
) -> None:
    config = load_config(tiny_config(**{"model.sharing": sharing}), [])
    module = build_objective(config.model, ObjectiveConfig(name=name), SPECIAL, 3)
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    groups = parameter_groups(module, 0.01, OptimizerConfig(weight_decay=0.2, beta1=0.7))

    parts: dict[bool, set[str]] = {True: set(), False: set()}
    for group in groups:
        own = {names[id(parameter)].split(".")[1] for parameter in group["params"]}
        parts[group["is_generators"]] |= own
        if group["is_generators"]:
            assert group["betas"] == (0.7, 0.999)
            assert group["weight_decay"] in (0.0, 0.2)
        else:
            assert "betas" not in group
            assert group["weight_decay"] in (0.0, 0.01)
    assert ("embeddings" in parts[True]) == owns_embeddings
    assert (
        parts[True] - {"embeddings"}
        == {
            "rtd": {"generator", "generator_head"},
            "adversarial": {"generator", "generator_head", "baseline"},
            "electric": {"generator", "generator_reverse", "generator_head"},
        }[name]
    )
    assert not parts[True] & parts[False]
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_the_generators_learning_rate_has_its_own_peak_and_warm_up_and_the_common_decay() -> None:
    optimizer = OptimizerConfig.model_validate(
        {"lr": 1e-3, "warmup_steps": 10, "generator": {"lr": 4e-4, "warmup_steps": 20}}
    )
    assert optimizer.generator_learning_rate(5, 100) == pytest.approx(4e-4 * 5 / 20 * 0.95)
    assert optimizer.learning_rate(5, 100) == pytest.approx(1e-3 * 5 / 10 * 0.95)
    assert OptimizerConfig().generator_learning_rate(5, 100) is None


def test_unset_keys_are_those_of_the_common_settings() -> None:
    optimizer = OptimizerConfig.model_validate({"lr": 3e-4, "beta2": 0.98, "generator": {"clip_norm": 0.5}})
    own = optimizer.for_generator
    assert (own.lr, own.beta2, own.clip_norm, own.warmup_steps) == (3e-4, 0.98, 0.5, 10_000)


def test_the_identity_lists_only_the_keys_that_are_set(tiny_config: Callable[..., Path]) -> None:
    plain = load_config(tiny_config(), []).identity()["optimizer"]
    own = load_config(tiny_config(), ["optimizer.generator.lr=1e-4"]).identity()["optimizer"]
    assert "generator" not in plain
    assert own == {**plain, "generator": {"lr": 1e-4}}


@pytest.mark.parametrize("override", ["objective.name=mlm", "objective.generator=uniform"])
def test_settings_of_a_generator_that_does_not_train_are_refused(
    tiny_config: Callable[..., Path], override: str
) -> None:
    with pytest.raises(UserError, match=r"optimizer\.generator needs a generator that is trained"):
        load_config(tiny_config(), [override, "optimizer.generator.lr=1e-4"])


def test_settings_of_a_generator_whose_layers_are_the_discriminators_are_refused(
    tiny_config: Callable[..., Path],
) -> None:
    tree = load_config(tiny_config(), []).model_dump()
    tree["model"] |= {"sharing": "all", "generator": tree["model"]["discriminator"]}
    tree["optimizer"]["generator"] = {}
    with pytest.raises(ValueError, match=r"optimizer\.generator needs a generator"):
        Config.model_validate(tree)
