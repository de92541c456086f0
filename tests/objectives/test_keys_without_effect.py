"""A key is reported as without effect exactly where another value of it leaves the loss the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from electra_dist.config import Config, ModelConfig, ObjectiveConfig
from electra_dist.config.rules import check_new_run, keys_without_effect
from electra_dist.errors import UserError
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

OTHER_VALUES: dict[str, Any] = {
    "temperature": 3.0,
    "disallow_correct": True,
    "mlm_weight": 3.0,
    "rtd_weight": 7.0,
    "token_weight": 2.0,
    "mask_token_prob": 0.3,
    "masking": "reference",
    "random_from": "unigram",
}
CHOICES = [
    *({"name": name} for name in ("rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric")),
    {"name": "adversarial"},
    {"name": "rtd", "generator": "uniform"},
    {"name": "rtd", "generator": "unigram"},
    {"name": "replace_mlm", "generator": "uniform"},
    {"name": "rtd", "random_share": 0.5},
]


def config_of(model: ModelConfig, objective: ObjectiveConfig, **sections: dict[str, Any]) -> Config:
    """Return the config of a run with these shapes and this objective."""
    train = {"num_steps": 100, "global_batch": 2, "micro_batch": 2, **sections.get("train", {})}
    return Config(
        run_dir="run",
        model=model,
        objective=objective,
        data={"corpus": "c", "heldout": "h", "seq_len": 64} | sections.get("data", {}),
        train=train,
        optimizer={"warmup_steps": 10} | sections.get("optimizer", {}),
        engine=sections.get("engine", {}),
        log=sections.get("log", {}),
    )


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
def test_keys_are_reported_exactly_where_the_loss_does_not_depend_on_them(
    choice: dict[str, Any], make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    # Few tokens with unequal probabilities: samples equal the original ones at times, and follow the temperature.
    model = make_model()[1].model_copy(update={"vocab_size": 12, "initializer_range": 0.5})
    ids = make_ids([64, 50], seq_len=64)
    ids = torch.where(ids > special.mask, 5 + ids % 7, ids)
    counts = np.arange(1, model.vocab_size + 1)

    def loss(objective: ObjectiveConfig) -> float:
        module = build_objective(model, objective, special, 3, count_V=counts)
        return module(StepInput(ids, torch.arange(2), 0, 5, 0.01, 0.02)).loss.item()

    before = loss(ObjectiveConfig(**choice))
    for key, value in OTHER_VALUES.items():
        if (choice["name"], key) == ("adversarial", "disallow_correct"):
            continue  # the config refuses it
        changed = ObjectiveConfig(**choice, **{key: value})
        reported = keys_without_effect(config_of(model, changed))
        assert (f"objective.{key}" in reported) == (loss(changed) == before), key


def test_default_values_are_not_reported_and_evaluations_need_held_out_rows(make_model: Callable[..., Any]) -> None:
    model = make_model()[1]
    assert keys_without_effect(config_of(model, ObjectiveConfig(name="mlm"))) == {}
    log = {"eval_every_steps": 10}
    assert keys_without_effect(config_of(model, ObjectiveConfig(), log=log)) == {}
    reported = keys_without_effect(config_of(model, ObjectiveConfig(), log=log, data={"heldout": None}))
    assert reported == {"log.eval_every_steps": "data.heldout is not set"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optimizer": {"warmup_steps": 101}}, "optimizer.warmup_steps 101 is longer than the run"),
        ({"optimizer": {"generator": {"warmup_steps": 101}}}, "optimizer.generator.warmup_steps 101"),
        ({"engine": {"zero_stage": 0, "offload_optimizer": True}}, "engine.offload_optimizer: true needs"),
    ],
)
def test_settings_that_are_hardly_meant_are_refused_for_a_new_run(
    sections: dict[str, Any], words: str, make_model: Callable[..., Any]
) -> None:
    model = make_model()[1]
    with pytest.raises(UserError, match=words):
        check_new_run(config_of(model, ObjectiveConfig(), **sections))


@pytest.mark.parametrize("sections", [{"optimizer": {"warmup_steps": 100}}, {"engine": {"offload_optimizer": True}}])
def test_settings_at_the_limit_are_accepted(sections: dict[str, Any], make_model: Callable[..., Any]) -> None:
    check_new_run(config_of(make_model()[1], ObjectiveConfig(), **sections))
