"""Builds the pretraining objective that a config names, with its networks; every rank does so."""

from __future__ import annotations

import numpy as np
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.config.schedule import Schedule
from electra_dist.model.towers import build_towers
from electra_dist.objectives.base import Objective
from electra_dist.objectives.corruption import (
    CorruptingObjective,
    FixedGenerator,
    FrozenGenerator,
    RandomReplacements,
    ordinary_weights,
    unigram_weights,
)
from electra_dist.objectives.electric import Electric
from electra_dist.objectives.rtd import (
    AdversarialGenerator,
    MaskedOnlyDetection,
    ReplacedTokenDetection,
    TwoStageDetection,
)
from electra_dist.objectives.token_prediction import AllTokensMlm, MaskedLanguageModel, ReplaceMlm

_CORRUPTING: dict[str, type[CorruptingObjective]] = {
    "rtd": ReplacedTokenDetection,
    "rtd_masked_only": MaskedOnlyDetection,
    "replace_mlm": ReplaceMlm,
    "all_tokens_mlm": AllTokensMlm,
    "electric": Electric,
    "adversarial": AdversarialGenerator,
}


def build_objective(
    model: ModelConfig,
    objective: ObjectiveConfig,
    special: SpecialIds,
    seed: int,
    backend: str = "auto",
    count_V: np.ndarray | None = None,
) -> Objective:
    """Build the objective that the config names, with its networks and weights drawn by `seed`, in fp32 on the host.

    The caller moves it to the device and sets its attribute `attention`; with `objective.generator: frozen`, the
    caller also loads the weights of its `frozen_generator`. `backend` is `kernels.backend`. `count_V` has the number
    of occurrences of each token in the corpus; None is allowed where `needs_token_counts` returns False.
    """
    towers = build_towers(model, seed, objective)
    if not objective.facts.has_generator:
        return MaskedLanguageModel(towers, objective, special, backend)
    objective_class = TwoStageDetection if objective.generator_only_steps else _CORRUPTING[objective.name]
    fixed_generator = None  # unless tokens are drawn with fixed probabilities, and not by a network
    if objective.generator == "uniform":
        fixed_generator = FixedGenerator(np.ones(model.vocab_size), objective.disallow_correct)
    elif objective.generator == "unigram":
        assert not isinstance(objective.temperature, Schedule)  # the config refuses it for a fixed generator
        weight_V = unigram_weights(count_V, special, objective.temperature)
        fixed_generator = FixedGenerator(weight_V, objective.disallow_correct)
    random_replacements = None
    if objective.draws_at_random:
        draws_unigrams = objective.random_from == "unigram"
        weight_V = unigram_weights(count_V, special) if draws_unigrams else ordinary_weights(model.vocab_size, special)
        random_replacements = RandomReplacements(weight_V, objective.disallow_correct)
    frozen_generator = FrozenGenerator(model) if objective.generator == "frozen" else None
    return objective_class(towers, objective, special, backend, fixed_generator, random_replacements, frozen_generator)


def needs_token_counts(objective: ObjectiveConfig) -> bool:
    """Return whether replacements are drawn by token frequency, so that `build_objective` needs token counts."""
    draws_unigrams = objective.draws_at_random and objective.random_from == "unigram"
    return objective.generator == "unigram" or draws_unigrams
