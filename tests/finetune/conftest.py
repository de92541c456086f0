"""A tiny encoder and its vocabulary."""

from support.small_encoder import encoder, model, vocabulary

__all__ = ["encoder", "model", "vocabulary"]
