"""Makes the parts of a network in the architecture that `model.architecture` names.

Guarantee: callers of these functions do not depend on the architecture. The parts of `bert` are those of `encoder.py`
and `pretraining_heads.py`; those of `modern` are subclasses of them with the same methods and the same shapes of
inputs and outputs. `attention_scopes.new_attention_mask` belongs to the same interface.
"""

from __future__ import annotations

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.architectures.modern_encoder import ModernEmbeddings, ModernEncoder
from electra_dist.model.architectures.modern_heads import ModernDetectionHead, ModernTokenHead
from electra_dist.model.encoder import Embeddings, Encoder, SharedEmbeddings
from electra_dist.model.pretraining_heads import DiscriminatorHead, GeneratorHead


def new_embeddings(model: ModelConfig, width: int) -> Embeddings:
    """Return new embeddings, whose tables are `width` features wide."""
    if model.architecture == "modern":
        return ModernEmbeddings(model, width)
    return SharedEmbeddings(model, width)


def new_encoder(model: ModelConfig, tower: TowerConfig, embedding_size: int) -> Encoder:
    """Return the layers of a new tower.

    Args:
        model: the architecture, eps and dropout.
        tower: number and sizes of the layers.
        embedding_size: width of the embeddings that the layers read; a projection precedes them if it is not theirs.
    """
    if model.architecture == "modern":
        return ModernEncoder(model, tower, embedding_size)
    return Encoder(model, tower, embedding_size)


def new_token_head(model: ModelConfig, hidden_size: int, embedding_size: int) -> GeneratorHead:
    """Return a new head that predicts tokens.

    Args:
        model: the architecture, the size of the vocabulary and eps.
        hidden_size: width of the states that the head reads.
        embedding_size: width of the token table, which is the head's output matrix.
    """
    if model.architecture == "modern":
        return ModernTokenHead(model, hidden_size, embedding_size)
    return GeneratorHead(model, hidden_size, embedding_size)


def new_detection_head(model: ModelConfig) -> DiscriminatorHead:
    """Return a new head that detects replaced tokens in the states of the discriminator."""
    if model.architecture == "modern":
        return ModernDetectionHead(model)
    return DiscriminatorHead(model)
