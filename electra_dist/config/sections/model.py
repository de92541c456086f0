"""Define the section `model`: the shapes of both towers."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from electra_dist.config.sections.base import Probability, Section, Size

# Keys that only the architecture `modern` reads.
MODERN_KEYS = ("global_every", "local_window", "global_rope_theta", "local_rope_theta")
_VOCAB_MULTIPLE = 128  # Rows of the token table are padded to a multiple of this.
# Defaults of these keys for a config with `architecture: modern`; they are the values of ModernBERT.
_MODERN_DEFAULTS = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_norm_eps": 1e-5}


class TowerConfig(Section):
    """Shape of one of ELECTRA's two transformers ("towers"): the discriminator or the generator."""

    hidden_size: Size = Field(description="Width: number of features of each token in every layer.")
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = Field(description="Number of transformer layers.")
    num_heads: Size = Field(description="Number of attention heads; must divide hidden_size.")
    intermediate_size: Size = Field(
        description="Width of the feed-forward network, with modern after gating; BERT uses 4 x hidden_size, "
        "ModernBERT 1.5 x."
    )

    @model_validator(mode="after")
    def _check_num_heads(self) -> TowerConfig:
        """Refuse a number of heads that does not divide hidden_size, because all heads get equal parts of it."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; change one of them"
            )
        return self


class ModelConfig(Section):
    """Shapes of the two transformers ("towers"), the weights that they share, dropout and initialisation."""

    architecture: Literal["bert", "modern"] = Field(
        default="bert",
        description="Architecture of both towers. bert: the paper's. modern: ModernBERT's, with rotary positions, "
        "LayerNorm before each sub-layer, gated feed-forward networks, local and global attention, and almost no "
        "biases.",
    )
    global_every: Size = Field(
        default=3,
        description="modern only: every n-th layer, from layer 0 on, is global: a token attends to its whole example. "
        "In all others it attends to a window.",
    )
    local_window: Annotated[int, Field(ge=2, le=2**24)] = Field(
        default=128,
        description="modern only: window of local layers, in tokens; a token attends to half of it on each side.",
    )
    global_rope_theta: Annotated[float, Field(gt=1)] = Field(
        default=160000.0,
        description="modern only: base of the wavelengths of rotary positions in global layers. ModernBERT: 10000 for "
        "rows of 1,024 tokens, 160000 for 8,192.",
    )
    local_rope_theta: Annotated[float, Field(gt=1)] = Field(
        default=10000.0,
        description="modern only: base of the wavelengths in local layers.",
    )
    vocab_size: Size = Field(
        default=30522,
        description="Most tokens; a run takes the size of its corpus's vocabulary. 30522: BERT's uncased one.",
    )
    embedding_size: Size = Field(
        default=1024,
        description="Width of the embedding tables that the towers share; a tower of another width projects them.",
    )
    max_positions: Size = Field(
        default=512,
        description="Longest row the model can read, in tokens; at least data.seq_len. With bert, the size of the "
        "table of positions.",
    )
    type_vocab_size: Size = Field(
        default=2,
        description="Number of token types, for segments A and B; at least 2 with bert.",
    )
    discriminator: TowerConfig = Field(
        description="Shape of the discriminator, the main tower, which is used after pretraining."
    )
    generator: TowerConfig = Field(
        description="Shape of the generator, the small tower that fills the masked positions; docs/objectives.md "
        "lists the usual sizes."
    )
    sharing: Literal["embeddings", "none", "gdes", "all"] = Field(
        default="embeddings",
        description="Weights that both towers share. embeddings: the token, position and type tables and their "
        "LayerNorm. gdes: as in DeBERTa-v3, the discriminator's embeddings are the generator's, to which it sends no "
        "gradients, plus a table of its own. all: embeddings and layers; the towers must have the same shape.",
    )
    generator_embedding_size: Size | None = Field(
        default=None,
        description="Width of the generator's own embedding tables, with sharing: none. Unset: embedding_size.",
    )
    hidden_dropout: Probability = Field(
        default=0.1,
        description="Dropout probability of the embeddings and of the output of each sub-layer. modern: 0 by default.",
    )
    attention_dropout: Probability = Field(
        default=0.1,
        description="Dropout probability of the attention weights; must be 0 for engine.attention: flex and flash3. "
        "modern: 0 by default.",
    )
    generator_dropout: Probability | None = Field(
        default=None,
        description="Dropout probability of the generator alone, in place of both values above: in its layers and, if "
        "it has tables of its own (sharing none or gdes), of its embeddings. Unset: as in the discriminator.",
    )
    layer_norm_eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-12,
        description="Epsilon that every LayerNorm adds to the variance. modern: 1e-5 by default.",
    )
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02,
        description="Standard deviation of the truncated normal distribution of the initial weights.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults_of_architecture(cls, section: Any) -> Any:
        """If `architecture` is `modern`, use `_MODERN_DEFAULTS` for the keys that the config does not set."""
        if isinstance(section, dict) and section.get("architecture") == "modern":
            return _MODERN_DEFAULTS | section
        return section

    @property
    def generator_embedding_width(self) -> int:
        """Return the width of the embedding tables that the generator reads, in features."""
        return self.generator_embedding_size or self.embedding_size

    @property
    def largest_attention_dropout(self) -> float:
        """Return the dropout probability of the attention weights in the tower that drops more of them."""
        return max(self.attention_dropout, self.generator_dropout or 0.0)

    @property
    def for_generator(self) -> ModelConfig:
        """Return the section for the generator's modules, whose dropout may be their own."""
        if self.generator_dropout is None:
            return self
        dropout = self.generator_dropout
        return self.model_copy(update={"hidden_dropout": dropout, "attention_dropout": dropout})

    def is_global(self, layer: int) -> bool:
        """Return whether tokens in layer `layer` (from 0) attend to their whole example and not only to a window."""
        return self.architecture == "bert" or layer % self.global_every == 0

    def visible_keys(self, num_layers: int, seq_len: int) -> int:
        """Return the sum over a network's layers of how many tokens a token attends to at most.

        In a global layer these are all `seq_len` tokens of a row, in a local layer the tokens of its window.
        """
        num_global = num_layers if self.architecture == "bert" else math.ceil(num_layers / self.global_every)
        window = min(seq_len, 2 * (self.local_window // 2) + 1)
        return num_global * seq_len + (num_layers - num_global) * window

    def with_vocabulary_of(self, size: int) -> ModelConfig:
        """Return the section with `vocab_size` lowered to `size`, or the section itself if it is not larger."""
        return self.model_copy(update={"vocab_size": size}) if size < self.vocab_size else self

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of the token table: vocab_size rounded up to a multiple of 128.

        The padding aligns each row of logits in GPU memory. Ids of padding rows never occur in a corpus.
        """
        return math.ceil(self.vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
