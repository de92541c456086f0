"""Parameters of both towers by arithmetic from the config: nothing is built, torch is not imported.

Counts are of what trains, without the padding of the token table: for ELECTRA-Large 335.14 M in the discriminator
(embeddings and head included: the model that is kept) and 19.51 M that only pretraining needs.
"""

from __future__ import annotations

from typing import NamedTuple

from electra_dist.config import ModelConfig, TowerConfig


class ParameterCounts(NamedTuple):
    """Trainable parameters."""

    discriminator: int  # with the shared embeddings and its head
    generator_only: int  # the generator's projection, layers and head

    @property
    def total(self) -> int:
        """Both towers; the embeddings once."""
        return self.discriminator + self.generator_only


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Trainable parameters of each tower."""
    width, hidden = model.embedding_size, model.discriminator.hidden_size
    layer_norm = 2 * width
    embeddings = (model.vocab_size + model.max_positions + model.type_vocab_size) * width + layer_norm
    discriminator_head = _dense(hidden, hidden) + _dense(hidden, 1)
    generator_head = _dense(model.generator.hidden_size, width) + layer_norm + model.vocab_size
    return ParameterCounts(
        discriminator=embeddings + _encoder(model.discriminator, width) + discriminator_head,
        generator_only=_encoder(model.generator, width) + generator_head,
    )


def _encoder(tower: TowerConfig, embedding_size: int) -> int:
    hidden, inner = tower.hidden_size, tower.intermediate_size
    projection = _dense(embedding_size, hidden) if embedding_size != hidden else 0
    layer = 4 * _dense(hidden, hidden) + _dense(hidden, inner) + _dense(inner, hidden) + 2 * 2 * hidden
    return projection + tower.num_layers * layer


def _dense(num_in: int, num_out: int) -> int:
    return num_in * num_out + num_out
