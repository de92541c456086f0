"""Fixtures of the scoring tests: a tiny encoder with its model and vocabulary."""

from support.small_encoder import encoder, model, modern_encoder, modern_model, vocabulary

__all__ = ["encoder", "model", "modern_encoder", "modern_model", "vocabulary"]
