"""Build the towers and heads of an objective as one module, whose parameter names are those in a checkpoint.

A tower is a stack of transformer layers. Every objective has a large tower, the model that is kept after pretraining.
It is named `discriminator`, also where it learns to predict tokens. Most objectives have a generator as well.

Guarantee: a parameter exists if and only if its objective trains it, so that ZeRO finds no gradient missing.

    embeddings                 token, position and type tables and their LayerNorm. With sharing `none` only the
                               generator reads them; with `gdes` both towers do, but only the generator trains them
    discriminator_embeddings   sharing `none`: the discriminator's own tables; `gdes`: what the discriminator adds to
                               the generator's tables
    generator, generator_head  if the objective has a generator network; with sharing `all` its layers are those of
                               the discriminator, and only the head exists separately
    generator_reverse          electric: the generator tower that reads from right to left
    baseline                   adversarial: the generator's estimate of its reward
    discriminator              the large tower
    discriminator_head         if the large tower detects replaced tokens
    token_head                 if the large tower predicts tokens, alone or beside detecting replaced ones
    copy_gate                  all_tokens_mlm: the gate between copying and predicting

The number of rows of the token table is rounded up to a multiple of 128. The up to 127 pad rows start at zero, are
never looked up and are in no softmax, so they never train. `parameter_counts.py` counts parameters without them.

The functions `new_*` choose the classes of the architecture that `model.architecture` names, so that callers do not
depend on it. The classes for `modern` (`modern_encoder.py`, `modern_heads.py`) are subclasses of those for `bert`
(`encoder.py`, `pretraining_heads.py`) or of their base classes, with the same shapes of inputs and outputs.
`attention.new_attention_mask` makes the mask for either.
"""

from __future__ import annotations

import torch
from torch import nn

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.dropout_keys import DropoutKeys
from electra_dist.model.encoder import Embeddings, Encoder, SharedEmbeddings
from electra_dist.model.modern_encoder import ModernEmbeddings, ModernEncoder
from electra_dist.model.modern_heads import ModernDetectionHead, ModernTokenHead
from electra_dist.model.pretraining_heads import DiscriminatorHead, GeneratorHead
from electra_dist.model.row_layout import RowLayout


def new_embeddings(model: ModelConfig, width: int) -> Embeddings:
    """Return a new module that embeds token ids as `width` features."""
    if model.architecture == "modern":
        return ModernEmbeddings(model, width)
    return SharedEmbeddings(model, width)


def new_encoder(model: ModelConfig, tower: TowerConfig, embedding_size: int) -> Encoder:
    """Return a new stack of layers, with a projection before it if `embedding_size` is not the width of the layers."""
    if model.architecture == "modern":
        return ModernEncoder(model, tower, embedding_size)
    return Encoder(model, tower, embedding_size)


def new_token_head(model: ModelConfig, hidden_size: int, embedding_size: int) -> GeneratorHead:
    """Return a new head that predicts tokens; its output matrix is the token table, of `embedding_size` columns."""
    if model.architecture == "modern":
        return ModernTokenHead(model, hidden_size, embedding_size)
    return GeneratorHead(model, hidden_size, embedding_size)


def new_detection_head(model: ModelConfig) -> DiscriminatorHead:
    """Return a new head that tells from the discriminator's hidden states whether each token was replaced."""
    if model.architecture == "modern":
        return ModernDetectionHead(model)
    return DiscriminatorHead(model)


def has_own_embeddings(model: ModelConfig, objective: ObjectiveConfig) -> bool:
    """Return whether the discriminator has its own tables: full ones, or differences to the generator's (`gdes`)."""
    return model.sharing in ("none", "gdes") and objective.trains_generator


class ElectraTowers(nn.Module):
    """Embeddings, towers and heads that one objective trains; test with `hasattr` which of them exist."""

    generator: Encoder
    generator_reverse: Encoder
    generator_head: GeneratorHead
    baseline: nn.Linear
    discriminator_head: DiscriminatorHead
    token_head: GeneratorHead
    copy_gate: nn.Linear
    discriminator_embeddings: Embeddings

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig | None = None) -> None:
        """Create the submodules. Their order must not change: optimizer states in checkpoints depend on it."""
        super().__init__()
        if objective is None:
            objective = ObjectiveConfig()
        self.model = model
        separate_embeddings = has_own_embeddings(model, objective)
        generator_width = model.generator_embedding_width if separate_embeddings else model.embedding_size
        self.is_difference = separate_embeddings and model.sharing == "gdes"
        self.embeddings = new_embeddings(model, generator_width)
        if separate_embeddings:
            self.discriminator_embeddings = new_embeddings(model, model.embedding_size)
        if objective.trains_generator:
            self._add_generator(objective, generator_width)
        self._add_discriminator(objective)
        if objective.trains_generator and model.sharing == "all":
            # nn.Module would register the discriminator under a second name. Writing to __dict__ avoids that, so each
            # shared parameter has one name only.
            self.__dict__["generator"] = self.discriminator

    def _add_generator(self, objective: ObjectiveConfig, embedding_width: int) -> None:
        model = self.model
        hidden_size = model.generator.hidden_size
        if model.sharing != "all":
            self.generator = new_encoder(model, model.generator, embedding_width)
        head_input_size = hidden_size
        if objective.facts.has_cloze_generator:
            self.generator_reverse = new_encoder(model, model.generator, embedding_width)
            head_input_size = 2 * hidden_size  # the head reads the states of both towers
        self.generator_head = new_token_head(model, head_input_size, embedding_width)
        if objective.facts.generator_estimates_reward:
            self.baseline = nn.Linear(hidden_size, 1)

    def _add_discriminator(self, objective: ObjectiveConfig) -> None:
        model = self.model
        hidden_size = model.discriminator.hidden_size
        self.discriminator = new_encoder(model, model.discriminator, model.embedding_size)
        if not objective.facts.predicts_tokens:
            self.discriminator_head = new_detection_head(model)
        if objective.facts.predicts_tokens or objective.discriminator_mlm_weight:
            self.token_head = new_token_head(model, hidden_size, model.embedding_size)
        if objective.facts.copies_tokens:
            self.copy_gate = nn.Linear(hidden_size, 1)

    def is_generators(self, name: str) -> bool:
        """Return whether only the generator's loss trains this parameter; then `optimizer.generator` applies to it."""
        parts: tuple[str, ...] = ("generator", "generator_reverse", "generator_head", "baseline")
        if hasattr(self, "discriminator_embeddings"):
            parts += ("embeddings",)
        return name.partition(".")[0] in parts

    def embed(self, ids_BS: torch.Tensor, layout: RowLayout, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the embeddings of rows, masked or not, from the generator's tables, [B, S, E]."""
        return self.embeddings(ids_BS, layout.position_BS, layout.token_type_BS, dropout_keys)

    def embed_discriminator(
        self, ids_BS: torch.Tensor, layout: RowLayout, dropout_keys: DropoutKeys | None = None
    ) -> torch.Tensor:
        """Return the discriminator's embeddings, [B, S, E]; with `gdes` the generator's tables get no gradient."""
        if not hasattr(self, "discriminator_embeddings"):
            return self.embed(ids_BS, layout, dropout_keys)
        base_BSE = None
        if self.is_difference:
            base_BSE = self.embeddings.tables(ids_BS, layout.position_BS, layout.token_type_BS).detach()
        return self.discriminator_embeddings(ids_BS, layout.position_BS, layout.token_type_BS, dropout_keys, base_BSE)

    def discriminator_table(self) -> torch.Tensor:
        """Return the discriminator's token table, [V, E], which is also the output matrix of its token head.

        With `model.sharing: gdes` it is the generator's table, without gradient, plus the discriminator's difference.
        """
        if not hasattr(self, "discriminator_embeddings"):
            return self.embeddings.word.weight
        own_table = self.discriminator_embeddings.word.weight
        if self.is_difference:
            return self.embeddings.word.weight.detach() + own_table
        return own_table
