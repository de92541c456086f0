"""Both towers and what they share, as one module whose names are those of a checkpoint.

`num_parameters` counts from the config alone, unpadded: 335.14 M discriminator (with embeddings and head) and 19.51 M
generator-only for ELECTRA-Large. A built model holds up to 127 rows of the token table more, which never train.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.encoder import Encoder, SharedEmbeddings
from electra_dist.model.heads import DiscriminatorHead, GeneratorHead
from electra_dist.model.rows import RowLayout


class ElectraTowers(nn.Module):
    """Shared embeddings, generator, discriminator and their heads. Initialise with `electra_dist.model.init`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embeddings = SharedEmbeddings(model)
        self.generator = Encoder(model, model.generator)
        self.generator_head = GeneratorHead(model)
        self.discriminator = Encoder(model, model.discriminator)
        self.discriminator_head = DiscriminatorHead(model)

    def embed(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """[B, S, E] embeddings of the rows themselves or of masked or corrupted ones; the layout is the original's."""
        return self.embeddings(ids_BS, layout.position_BS, layout.token_type_BS)


class ParameterCount(NamedTuple):
    """Trainable parameters without the padding of the token table."""

    embeddings: int
    discriminator: int  # with embeddings and head: the model that is kept
    generator_only: int  # what pretraining adds: its projection, layers and head

    @property
    def total(self) -> int:
        """Both towers; the embeddings once."""
        return self.discriminator + self.generator_only


def num_parameters(model: ModelConfig) -> ParameterCount:
    """Parameters of each tower by arithmetic; nothing is built."""
    width, hidden = model.embedding_size, model.discriminator.hidden_size
    embeddings = (model.vocab_size + model.max_positions + model.type_vocab_size + 2) * width
    discriminator_head = _dense(hidden, hidden) + _dense(hidden, 1)
    generator_head = _dense(model.generator.hidden_size, width) + 2 * width + model.vocab_size
    return ParameterCount(
        embeddings=embeddings,
        discriminator=embeddings + _encoder(model, model.discriminator) + discriminator_head,
        generator_only=_encoder(model, model.generator) + generator_head,
    )


def _dense(num_in: int, num_out: int) -> int:
    return num_in * num_out + num_out


def _encoder(model: ModelConfig, tower: TowerConfig) -> int:
    hidden, inner = tower.hidden_size, tower.intermediate_size
    layer = 4 * _dense(hidden, hidden) + _dense(hidden, inner) + _dense(inner, hidden) + 2 * 2 * hidden
    project = _dense(model.embedding_size, hidden) if model.embedding_size != hidden else 0
    return project + tower.num_layers * layer
