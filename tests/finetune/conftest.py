"""Fixtures of a tiny encoder and its vocabulary; they are defined in tests/support/small_encoder.py."""

from support.small_encoder import encoder, model, modern_encoder, modern_model, vocabulary

__all__ = ["encoder", "model", "modern_encoder", "modern_model", "vocabulary"]
