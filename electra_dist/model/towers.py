"""The towers of an objective and what they share, as one module whose names are those of a checkpoint.

Guarantee: a parameter exists if and only if its objective trains it, so that ZeRO finds no gradient missing.

    embeddings                token, position and type tables and their LayerNorm; with sharing `none` and `gdes` the
                              generator's
    discriminator_embeddings  sharing `none`: the discriminator's own; `gdes`: its difference to the generator's tables
    generator, generator_head         unless the objective has no generator; with sharing `all` the head alone
    generator_reverse                 electric: the tower that reads from right to left
    baseline                          adversarial: what the generator expects of the discriminator
    discriminator                     the tower that is kept, whatever it learns
    discriminator_head                where it tells replaced tokens
    token_head, copy_gate             where it predicts tokens

The token table has its rows padded to a multiple of 128: up to 127 rows that are zero at the start, never looked up,
never in a softmax, and so never train. `count.py` counts parameters without them.
"""

from __future__ import annotations

import torch
from torch import nn

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.encoder import Encoder, SharedEmbeddings
from electra_dist.model.heads import DiscriminatorHead, GeneratorHead
from electra_dist.model.rows import RowLayout

PREDICTS_TOKENS = ("mlm", "replace_mlm", "all_tokens_mlm")  # objectives whose large tower predicts tokens


def has_generator(objective: ObjectiveConfig) -> bool:
    """Whether a network makes the replacements."""
    return objective.name != "mlm" and objective.generator == "trained"


def has_own_embeddings(model: ModelConfig, objective: ObjectiveConfig) -> bool:
    """Whether the discriminator has embeddings (or differences) of its own."""
    return model.sharing in ("none", "gdes") and has_generator(objective)


class ElectraTowers(nn.Module):
    """Embeddings, towers and heads. Initialise with `electra_dist.model.init`."""

    generator: Encoder
    generator_reverse: Encoder
    generator_head: GeneratorHead
    baseline: nn.Linear
    discriminator_head: DiscriminatorHead
    token_head: GeneratorHead
    copy_gate: nn.Linear
    discriminator_embeddings: SharedEmbeddings

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig | None = None) -> None:
        """`objective` decides which of the parts there are; default: replaced-token detection."""
        super().__init__()
        objective = objective or ObjectiveConfig()
        self.model = model
        small, big = model.generator, model.discriminator
        own = has_own_embeddings(model, objective)
        small_width = model.generator_embedding_width if own else model.embedding_size
        self.is_difference = own and model.sharing == "gdes"
        self.embeddings = SharedEmbeddings(model, small_width)
        if own:
            self.discriminator_embeddings = SharedEmbeddings(model)
        if has_generator(objective):
            if model.sharing != "all":
                self.generator = Encoder(model, small, small_width)
            num_towers = 1
            if objective.name == "electric":
                self.generator_reverse = Encoder(model, small, small_width)
                num_towers = 2
            self.generator_head = GeneratorHead(model, num_towers * small.hidden_size, small_width)
            if objective.name == "adversarial":
                self.baseline = nn.Linear(small.hidden_size, 1)
        self.discriminator = Encoder(model, big)
        if objective.name in PREDICTS_TOKENS:
            self.token_head = GeneratorHead(model, big.hidden_size, model.embedding_size)
        else:
            self.discriminator_head = DiscriminatorHead(model)
        if objective.name == "all_tokens_mlm":
            self.copy_gate = nn.Linear(big.hidden_size, 1)
        if has_generator(objective) and model.sharing == "all":
            self.__dict__["generator"] = self.discriminator  # one set of parameters under one name

    def embed(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """[B, S, E] for the generator, of the rows themselves or of masked ones; the layout is the original's."""
        return self.embeddings(ids_BS, layout.position_BS, layout.token_type_BS)

    def embed_discriminator(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """[B, S, E] for the discriminator; under `gdes` no gradient reaches the generator's tables."""
        if not hasattr(self, "discriminator_embeddings"):
            return self.embed(ids_BS, layout)
        places = (ids_BS, layout.position_BS, layout.token_type_BS)
        base = self.embeddings.tables(*places).detach() if self.is_difference else None
        return self.discriminator_embeddings(*places, base)

    def discriminator_table(self) -> torch.Tensor:
        """[V, E]: the token table that the discriminator reads, for a head that is tied to it."""
        if not hasattr(self, "discriminator_embeddings"):
            return self.embeddings.word.weight
        own = self.discriminator_embeddings.word.weight
        return self.embeddings.word.weight.detach() + own if self.is_difference else own
