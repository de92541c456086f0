"""Count the towers' parameters by arithmetic from the config, without building a module or importing torch.

Only parameters that train are counted, without the padding of the token table. ELECTRA-Large has 335.14 M in the
discriminator with embeddings and head, which is the model that is kept, and 19.51 M that only pretraining needs.
"""

from __future__ import annotations

from typing import NamedTuple

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig


class ParameterCounts(NamedTuple):
    """Numbers of trainable parameters; those that both networks share count for the discriminator."""

    discriminator: int  # with its head and the embeddings that it trains
    generator_only: int  # parameters that only the generator's loss trains

    @property
    def total(self) -> int:
        """Number of all trainable parameters; those that both networks share count once."""
        return self.discriminator + self.generator_only


def parameter_counts(model: ModelConfig, objective: ObjectiveConfig | None = None) -> ParameterCounts:
    """Return the numbers of trainable parameters; `objective` None stands for replaced-token detection."""
    if objective is None:
        objective = ObjectiveConfig()
    width = model.embedding_size
    hidden = model.discriminator.hidden_size
    head = _token_head(model, hidden, width) if objective.facts.predicts_tokens else _detection_head(model)
    if objective.discriminator_mlm_weight:
        head += _token_head(model, hidden, width)
    if objective.facts.copies_tokens:
        head += _dense(hidden, 1)  # gate between copying the input token and predicting
    return ParameterCounts(
        discriminator=_embeddings(model, width) + _encoder(model, model.discriminator, width) + head,
        generator_only=_generator_only(model, objective),
    )


def _generator_only(model: ModelConfig, objective: ObjectiveConfig) -> int:
    """Return how many parameters only the generator's loss trains; shared ones (`model.sharing`) do not count."""
    if not objective.trains_generator:
        return 0
    tower = model.generator
    width = model.generator_embedding_width
    num_towers = 2 if objective.facts.has_cloze_generator else 1
    count = _token_head(model, num_towers * tower.hidden_size, width)
    if model.sharing != "all":
        count += num_towers * _encoder(model, tower, width)
    if model.sharing in ("none", "gdes"):
        count += _embeddings(model, width)
    if objective.facts.generator_estimates_reward:
        count += _dense(tower.hidden_size, 1)
    return count


def frozen_generator_parameters(model: ModelConfig, objective: ObjectiveConfig) -> int:
    """Return the number of parameters of a frozen generator, which `parameter_counts` leaves out; 0 without one."""
    if objective.generator != "frozen":
        return 0
    width = model.generator_embedding_width
    head = _token_head(model, model.generator.hidden_size, width)
    return _embeddings(model, width) + _encoder(model, model.generator, width) + head


def _embeddings(model: ModelConfig, width: int) -> int:
    if model.architecture == "modern":
        return model.vocab_size * width + _layer_norm(model, width)
    table_rows = model.vocab_size + model.max_positions + model.type_vocab_size
    return table_rows * width + _layer_norm(model, width)


def _token_head(model: ModelConfig, hidden: int, width: int) -> int:
    """Count the parameters of a head that predicts tokens; `_embeddings` counts its output matrix, the token table."""
    return _dense(hidden, width, has_bias=_has_biases(model)) + _layer_norm(model, width) + model.vocab_size


def _detection_head(model: ModelConfig) -> int:
    hidden = model.discriminator.hidden_size
    layer_norm = _layer_norm(model, hidden) if model.architecture == "modern" else 0
    return _dense(hidden, hidden, has_bias=_has_biases(model)) + layer_norm + _dense(hidden, 1)


def _encoder(model: ModelConfig, tower: TowerConfig, embedding_size: int) -> int:
    hidden = tower.hidden_size
    intermediate = tower.intermediate_size
    has_bias = _has_biases(model)
    projection = _dense(embedding_size, hidden, has_bias) if embedding_size != hidden else 0
    attention = 4 * _dense(hidden, hidden, has_bias)  # query, key, value and output
    feed_forward = _dense(hidden, intermediate, has_bias) + _dense(intermediate, hidden, has_bias)
    # There are two per layer. With `modern` the first layer has only one, but one follows the last layer.
    layer_norms = 2 * tower.num_layers * _layer_norm(model, hidden)
    if model.architecture == "modern":
        feed_forward += _dense(hidden, intermediate, has_bias)  # the gate
    return projection + layer_norms + tower.num_layers * (attention + feed_forward)


def _has_biases(model: ModelConfig) -> bool:
    return model.architecture == "bert"


def _layer_norm(model: ModelConfig, width: int) -> int:
    return 2 * width if _has_biases(model) else width


def _dense(num_in: int, num_out: int, has_bias: bool = True) -> int:
    return num_in * num_out + (num_out if has_bias else 0)
