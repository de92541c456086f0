"""From a config to the module that learns: towers, objective, and what does not fit together.

`check_objective` needs the config alone and comes before anything is written; `build_objective` is every rank's.
"""

from __future__ import annotations

import numpy as np

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.model.init import build_towers
from electra_dist.model.rows import SpecialIds
from electra_dist.model.towers import has_generator
from electra_dist.objectives.adversarial import AdversarialGenerator
from electra_dist.objectives.all_tokens_mlm import AllTokensMlm
from electra_dist.objectives.base import Objective
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.objectives.electric import Electric
from electra_dist.objectives.fixed_generator import FixedGenerator, uniform_weights, unigram_weights
from electra_dist.objectives.mlm import MaskedLanguageModel
from electra_dist.objectives.replace_mlm import ReplaceMlm
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.objectives.rtd_masked_only import MaskedOnlyDetection
from electra_dist.objectives.two_stage import TwoStageDetection

_CORRUPTING: dict[str, type[CorruptingObjective]] = {
    "rtd": ReplacedTokenDetection,
    "rtd_masked_only": MaskedOnlyDetection,
    "replace_mlm": ReplaceMlm,
    "all_tokens_mlm": AllTokensMlm,
    "electric": Electric,
    "adversarial": AdversarialGenerator,
}


def check_objective(model: ModelConfig, objective: ObjectiveConfig) -> None:
    """Refuse what the two sections say together but cannot be.

    Raises:
        UserError: one line with the keys and the next step.
    """
    if objective.generator_only_steps:
        if model.generator != model.discriminator or model.generator_embedding_width != model.embedding_size:
            raise UserError(
                "objective.generator_only_steps: the discriminator begins as a copy of the generator, so they must be "
                "of one size; set model.generator to model.discriminator and leave model.generator_embedding_size out"
            )
        if model.sharing != "none":
            raise UserError(
                f"objective.generator_only_steps: a frozen generator shares nothing, but model.sharing is "
                f"{model.sharing}; set model.sharing: none"
            )
    if not has_generator(objective) and model.sharing != "embeddings":
        raise UserError(
            f"model.sharing {model.sharing}: objective {objective.name} with generator {objective.generator} has one "
            f"tower only; leave model.sharing out"
        )
    if objective.name == "electric" and model.sharing == "all":
        raise UserError("objective electric: its generator is two causal towers; set model.sharing: embeddings")


def build_objective(
    model: ModelConfig,
    objective: ObjectiveConfig,
    special: SpecialIds,
    seed: int,
    backend: str = "auto",
    count_V: np.ndarray | None = None,
) -> Objective:
    """Return the initialised module of `objective`, on the host.

    Args:
        model: both towers.
        objective: what is learnt.
        special: ids of the special tokens.
        seed: of the initialisation.
        backend: `kernels.backend`.
        count_V: how often each token is in the corpus; for `generator: unigram`.
    """
    check_objective(model, objective)
    towers = build_towers(model, seed, objective)
    if objective.name == "mlm":
        return MaskedLanguageModel(towers, objective, special, backend)
    kind = TwoStageDetection if objective.generator_only_steps else _CORRUPTING[objective.name]
    return kind(towers, objective, special, backend, _fixed_generator(model, objective, special, count_V))


def _fixed_generator(
    model: ModelConfig, objective: ObjectiveConfig, special: SpecialIds, count_V: np.ndarray | None
) -> FixedGenerator | None:
    """Return what stands in for the generator's network, or None where there is one."""
    if objective.generator == "trained":
        return None
    if objective.generator == "uniform":
        return FixedGenerator(uniform_weights(model.vocab_size), objective.disallow_correct)
    assert count_V is not None, "generator `unigram` needs the corpus's token counts"
    never = (special.pad, special.cls, special.sep, special.mask)
    return FixedGenerator(unigram_weights(count_V, never, objective.temperature), objective.disallow_correct)
