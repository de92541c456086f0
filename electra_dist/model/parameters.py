"""Parameters of the towers by arithmetic from the config: nothing is built, torch is not imported.

Counts are of what trains, without the padding of the token table: for ELECTRA-Large 335.14 M in the discriminator
(embeddings and head included: the model that is kept) and 19.51 M that only pretraining needs.
"""

from __future__ import annotations

from typing import NamedTuple

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig


class ParameterCounts(NamedTuple):
    """Trainable parameters."""

    discriminator: int  # with the embeddings that it reads and its head
    generator_only: int  # everything else

    @property
    def total(self) -> int:
        """All; shared ones once."""
        return self.discriminator + self.generator_only


def parameter_counts(model: ModelConfig, objective: ObjectiveConfig | None = None) -> ParameterCounts:
    """Trainable parameters of each tower under an objective (default: replaced-token detection)."""
    objective = objective or ObjectiveConfig()
    width, hidden = model.embedding_size, model.discriminator.hidden_size
    if objective.name in ("mlm", "replace_mlm", "all_tokens_mlm"):
        head = _token_head(model, hidden, width)
    else:
        head = _dense(hidden, hidden) + _dense(hidden, 1)
    if objective.name == "all_tokens_mlm":
        head += _dense(hidden, 1)
    return ParameterCounts(
        discriminator=_embeddings(model, width) + _encoder(model.discriminator, width) + head,
        generator_only=_generator_only(model, objective),
    )


def _generator_only(model: ModelConfig, objective: ObjectiveConfig) -> int:
    if objective.name == "mlm" or objective.generator != "trained":
        return 0
    tower, width = model.generator, model.generator_embedding_width
    num_towers = 2 if objective.name == "electric" else 1
    count = _token_head(model, num_towers * tower.hidden_size, width)
    if model.sharing != "all":
        count += num_towers * _encoder(tower, width)
    if model.sharing in ("none", "gdes"):
        count += _embeddings(model, width)
    if objective.name == "adversarial":
        count += _dense(tower.hidden_size, 1)
    return count


def _embeddings(model: ModelConfig, width: int) -> int:
    return (model.vocab_size + model.max_positions + model.type_vocab_size) * width + 2 * width


def _token_head(model: ModelConfig, hidden: int, width: int) -> int:
    return _dense(hidden, width) + 2 * width + model.vocab_size


def _encoder(tower: TowerConfig, embedding_size: int) -> int:
    hidden, inner = tower.hidden_size, tower.intermediate_size
    projection = _dense(embedding_size, hidden) if embedding_size != hidden else 0
    layer = 4 * _dense(hidden, hidden) + _dense(hidden, inner) + _dense(inner, hidden) + 2 * 2 * hidden
    return projection + tower.num_layers * layer


def _dense(num_in: int, num_out: int) -> int:
    return num_in * num_out + num_out
