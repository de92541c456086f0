"""Read the frozen generator that `train.init_generator_from` names, and bind the run to its weights.

Guarantee: the sha256 of the weights is part of the run's identity. Every start of the run reads the weights again from
the same place; if they have changed, the start is refused before anything is written. The digest is that of the fp32
values under this project's names, so a run and its export to Hugging Face have the same one.

How: from a run of `objective.name: mlm`, the network in its newest good checkpoint becomes the generator. A
Hugging Face folder must be an ElectraForMaskedLM. At each start every rank reads the source twice, once for the
identity and once to use the weights, so it must be visible on all nodes.

Limits: a source that is still training changes with each checkpoint; name its export, or wait for its end.
"""

from __future__ import annotations

from pathlib import Path

from electra_dist.config import Config, ModelConfig
from electra_dist.errors import UserError
from electra_dist.objectives.frozen_generator import FrozenGenerator
from electra_dist.pretrained.hf import State, shape_of, standalone
from electra_dist.pretrained.hf_folders import check_shape, cut_positions, read_tower
from electra_dist.pretrained.load_towers import weights_sha256
from electra_dist.pretrained.run_weights import load_run_weights
from electra_dist.pretrained.starting_weights import check_vocabulary
from electra_dist.run.folder import is_run_folder
from electra_dist.tokenizer import Vocabulary

_KEY = "train.init_generator_from"
# Prefixes of parameter names of an mlm run's only network -> those of a generator.
_LARGE_TO_GENERATOR = {"embeddings.": "embeddings.", "discriminator.": "generator.", "token_head.": "generator_head."}


def with_generator_digest(config: Config) -> Config:
    """Return the config with `objective.generator_sha256` set to the digest of the frozen generator's weights.

    Raises UserError if the config already sets it to another digest.
    """
    digest = weights_sha256(read_frozen_generator(config))
    objective = config.objective.model_copy(update={"generator_sha256": digest})
    return config.model_copy(update={"objective": objective})


def read_frozen_generator(config: Config) -> State:
    """Read the weights of the frozen generator, in fp32 on the host, by their parameter names in `FrozenGenerator`.

    Raises UserError if their shape differs from `model.generator`, or if `objective.generator_sha256` is set and their
    digest differs from it.
    """
    folder = Path(config.train.init_generator_from or "")
    if is_run_folder(folder):
        state = _large_tower_of_run(folder, config.model)
    elif (folder / "config.json").exists():
        state = read_tower(config.model, "generator", folder)
    else:
        raise UserError(
            f"{_KEY} {folder}: neither a run (config.yaml) nor a Hugging Face folder (config.json); set it to the "
            f"folder of a run with objective.name: mlm, or of an ElectraForMaskedLM"
        )
    missing = FrozenGenerator(config.model).state_dict().keys() - state.keys()
    if missing:
        raise UserError(
            f"{_KEY} {folder}: the weights lack {min(missing)}; name the folder of an ElectraForMaskedLM, which has a "
            f"head that predicts tokens"
        )
    state = cut_positions(state, config.model.max_positions)
    expected_digest = config.objective.generator_sha256
    digest = weights_sha256(state)
    if expected_digest is not None and digest != expected_digest:
        raise UserError(
            f"{_KEY} {folder}: the sha256 of the weights is {digest}, but objective.generator_sha256 is "
            f"{expected_digest}; restore the folder's weights, or start another run with them"
        )
    return state


def check_generator_vocabulary(config: Config, vocabulary: Vocabulary) -> None:
    """Raise UserError if the frozen generator's folder has a vocab.txt with other tokens than the corpus."""
    check_vocabulary(_KEY, Path(config.train.init_generator_from or ""), vocabulary)


def _large_tower_of_run(run_dir: Path, model: ModelConfig) -> State:
    """Read the only network of an `mlm` run from its newest good checkpoint; name its parameters as a generator's."""
    run = load_run_weights(run_dir)
    objective_name = run.config.objective.name
    if objective_name != "mlm":
        raise UserError(
            f"{_KEY} {run_dir}: is a run of objective.name {objective_name}; name a run of mlm, or export this one "
            f"(electra-dist export) and name its folder generator"
        )
    check_shape(str(run_dir), shape_of(run.config.model, "discriminator"), model, "generator")
    state = {}
    for name, value in standalone(run.weights, run.config.model, "discriminator").items():
        for prefix, generator_prefix in _LARGE_TO_GENERATOR.items():
            if name.startswith(prefix):
                state[generator_prefix + name.removeprefix(prefix)] = value
    return state
