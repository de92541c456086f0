"""Small models, a tiny encoder and its vocabulary."""

from support.small_encoder import encoder, model, vocabulary
from support.small_models import hf_twins, make_config, make_rows, make_towers, special

__all__ = ["encoder", "hf_twins", "make_config", "make_rows", "make_towers", "model", "special", "vocabulary"]
