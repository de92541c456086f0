"""Joint MLM: the discriminator also predicts tokens. Its cost in the plan, its export, and which settings allow it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64_truth import shaken

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.config.load import load_config
from electra_dist.model.counts import parameter_counts, token_flops
from electra_dist.model.towers import build_towers
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.pretrained.hf import to_hf

JOINT = ObjectiveConfig(discriminator_mlm_weight=2.0)
PLAIN = ObjectiveConfig()


@pytest.fixture
def model(make_model: Callable[..., Any]) -> ModelConfig:
    """The shapes of two small towers."""
    config: ModelConfig = make_model()[1]
    return config


def test_plan_counts_the_parameters_and_the_flops_of_the_second_head(model: ModelConfig) -> None:
    built = sum(parameter.numel() for parameter in build_towers(model, 3, JOINT).parameters())
    pad_rows = (model.padded_vocab_size - model.vocab_size) * model.embedding_size
    assert parameter_counts(model, JOINT).total == built - pad_rows

    width = model.discriminator.hidden_size
    head_forward = 2 * width * model.embedding_size + 2 * model.embedding_size * model.vocab_size
    difference = token_flops(model, 64, JOINT).total - token_flops(model, 64, PLAIN).total
    assert difference == pytest.approx(3 * JOINT.mask_prob * head_forward)


def test_an_export_is_that_of_a_discriminator_without_the_second_head(model: ModelConfig) -> None:
    state = dict(shaken(build_towers(model, 3, JOINT)).named_parameters())
    without_head = {name: value for name, value in state.items() if not name.startswith("token_head.")}

    exported = to_hf(state, model, "discriminator")
    expected = to_hf(without_head, model, "discriminator")

    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert "generator_lm_head.bias" not in exported  # its presence would make it an ElectraForMaskedLM


@pytest.mark.parametrize("zero_weight", ["mlm_weight", "rtd_weight"])
def test_a_loss_of_weight_0_contributes_nothing_and_every_parameter_still_has_a_gradient(
    zero_weight: str, model: ModelConfig, make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    objective = ObjectiveConfig(discriminator_mlm_weight=2.0, **{zero_weight: 0.0})
    module = build_objective(model, objective, special, 3)
    ids = make_ids([64, 50], seq_len=64)

    out = module(StepInput(ids, torch.arange(2), 0, 5, 0.01, 0.02))
    out.loss.backward()

    sums = Sums(*out.sums.tolist())
    generator_loss = 0.01 * objective.mlm_weight * sums.mlm_loss_sum
    discriminator_loss = 0.02 * objective.rtd_weight * sums.rtd_loss_sum + 0.01 * 2.0 * sums.token_loss_sum
    assert out.loss.item() == pytest.approx(generator_loss + discriminator_loss, rel=1e-6)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


def test_without_joint_mlm_the_identity_of_a_run_is_as_before(tiny_config: Callable[..., Path]) -> None:
    plain = load_config(tiny_config(), [])
    joint = load_config(tiny_config(), ["objective.discriminator_mlm_weight=1"])
    assert "discriminator_mlm_weight" not in plain.identity()["objective"]
    assert joint.identity()["objective"]["discriminator_mlm_weight"] == 1.0
