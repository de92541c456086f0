"""Build the networks and the loss of a config, load the weights of a run, and score text.

Guarantee: masks, samples, dropout and losses are those of a run with the same config, seed and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from electra_dist.config import Config
from electra_dist.config.sections.base import NonNegative, Seed
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.library.argument_checks import Text
from electra_dist.library.corpus import Corpus
from electra_dist.model import towers as model_towers
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives import build_objective as objective_builder
from electra_dist.objectives.base import Objective, StepInput, loss_counts
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.pretrained.encoder import Pretrained, TowerName, device_of_choice, load_pretrained
from electra_dist.pretrained.weights import load_run_weights, read_frozen_generator
from electra_dist.scoring.text_scores import TextScore, TextScorer


def build_towers(config: Config) -> ElectraTowers:
    """Build generator and discriminator with their heads and the random weights that a run of this config starts from.
    Weights that `train.init_from` names are not loaded.
    """
    return model_towers.build_towers(config.model, config.seed, config.objective)


def build_objective(config: Config, corpus: Corpus) -> Objective:
    """Build the module that holds both towers and computes the loss of a step, with its initial weights, on the host.
    Call the module with the result of `step_input`; `load_weights` loads the weights of a run. Weights that
    `train.init_from` names are not loaded, but a frozen generator's weights are.
    Raises ManifestMismatch if the corpus has another vocabulary size than the config, UserError if the sections
    contradict each other or the weights of a frozen generator cannot be used.
    """
    num_tokens = corpus.corpora.tokenizer.vocab_size
    if num_tokens != config.model.vocab_size:
        raise ManifestMismatch(
            f"build_objective: the corpus was built with a vocabulary of {num_tokens} entries, but model.vocab_size "
            f"is {config.model.vocab_size}; pass a config with model.vocab_size: {num_tokens}, or another corpus"
        )
    count_V = corpus.token_counts() if objective_builder.needs_token_counts(config.objective) else None
    objective = objective_builder.build_objective(
        config.model, config.objective, corpus.special, config.seed, config.kernels.backend, count_V
    )
    if isinstance(objective, CorruptingObjective) and objective.frozen_generator is not None:
        objective.frozen_generator.load_state_dict(read_frozen_generator(config))
    return objective


def step_input(objective: Objective, ids: torch.Tensor, step: NonNegative = 0, seed: Seed = 42) -> StepInput:
    """Return what to call an objective with, so that it computes the losses of all rows of a step as one batch.
    `ids` are int64 [global_batch, seq_len] on the module's device. The losses are means over the tokens of these rows.
    Masks, samples and dropout are those of a run with this seed at this step (counted from 0). Values that follow a
    schedule are those of the first step. Raises UserError for another tensor, or an id that is not in the vocabulary.
    """
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise UserError(
            f"step_input: the argument ids is a tensor of {ids.dtype} and shape {tuple(ids.shape)}, but must be int64 "
            f"[global_batch, seq_len], as Corpus.batch returns it"
        )
    vocab_size = objective.towers.model.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise UserError(
            f"step_input: the argument ids has ids from {ids.min()} to {ids.max()}, but the vocabulary has 0 to "
            f"{vocab_size - 1}; pass rows of the corpus that the objective was built for"
        )
    counts = loss_counts(ids, objective.special, objective.objective).sum(0).clamp(min=1)
    first_scale, second_scale = 1.0 / counts
    rows = torch.arange(len(ids), device=ids.device)
    return StepInput(ids, rows, step, seed, first_scale, second_scale)


def load_weights(module: Objective | ElectraTowers, run_dir: str | Path, step: NonNegative | None = None) -> int:
    """Copy a checkpoint's verified weights into a module built from the run's config; return the checkpoint's step.
    `step` selects the checkpoint; None selects the newest undamaged one. Raises UserError if `run_dir` is not a run,
    has no undamaged checkpoint (of this step), or has parameters of other names or shapes.
    """
    run = load_run_weights(Path(run_dir), step)
    prefix = "" if isinstance(module, Objective) else "towers."
    parameters = dict(module.named_parameters())
    weights = {name.removeprefix(prefix): weight for name, weight in run.weights.items()}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        raise UserError(
            f"{run_dir}: the parameters of the run are not those of the module; build the module with the run's own "
            f"config, `open_run({str(run_dir)!r})`"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return run.state.step


def load(model: str | Path, tower: TowerName = "discriminator", step: NonNegative | None = None) -> Pretrained:
    """Load the discriminator or the generator of a pretrained model, with its tokenizer.
    `.tokenizer.encode(texts)` of the result gives token ids; `.backbone()` is a torch module from ids to states.
    `model` is a run folder, a Hugging Face folder, or "random:CONFIG.yaml" for random weights. A Hugging Face folder
    holds one tower, which the default loads even if it is a generator. `step` is a run's checkpoint; None: the newest.
    """
    return load_pretrained(str(model), tower, step=step)


def score_texts(model: Pretrained, texts: Sequence[Text]) -> list[TextScore]:
    """Return how plausible a model from `load` finds each text and its tokens, as `electra-dist score` prints it.
    Raises UserError if the model came without its pretraining head.
    """
    return list(TextScorer(model, device_of_choice()).score(texts))


def replaced_probability(model: Pretrained, texts: Sequence[Text]) -> list[list[tuple[str, float]]]:
    """Return the tokens of each text with the probability, in [0, 1], that each was replaced by another one.
    Raises UserError if the model came without its pretraining head or does not detect replaced tokens.
    """
    scorer = TextScorer(model, device_of_choice())
    scorer.check_detects_replaced()
    return [list(zip(text.tokens, text.replaced_probability or [], strict=True)) for text in scorer.score(texts)]
