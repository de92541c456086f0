"""Fixtures of the scoring tests: a tiny encoder with its model and vocabulary."""

from support.small_encoder import encoder, model, vocabulary

__all__ = ["encoder", "model", "vocabulary"]
