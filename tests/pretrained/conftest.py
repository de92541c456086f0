"""Fixtures of small models, and of a tiny encoder with its vocabulary; they are defined in tests/support/."""

from support.small_encoder import encoder, model, vocabulary
from support.small_models import hf_twins, make_config, make_rows, make_towers, special

__all__ = ["encoder", "hf_twins", "make_config", "make_rows", "make_towers", "model", "special", "vocabulary"]
