"""Create the embeddings, layers and heads of a network in the architecture that `model.architecture` names.

Guarantee: callers of these functions do not depend on the architecture. The classes for `modern` (`modern_encoder.py`,
`modern_heads.py`) are subclasses of those for `bert` (`encoder.py`, `pretraining_heads.py`) or of their base classes,
with the same shapes of inputs and outputs. `attention_scopes.new_attention_mask` makes the mask for either.
"""

from __future__ import annotations

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.architectures.modern_encoder import ModernEmbeddings, ModernEncoder
from electra_dist.model.architectures.modern_heads import ModernDetectionHead, ModernTokenHead
from electra_dist.model.encoder import Embeddings, Encoder, SharedEmbeddings
from electra_dist.model.pretraining_heads import DiscriminatorHead, GeneratorHead


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
