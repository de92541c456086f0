"""Small models, rows of every shape, and their Hugging Face twins."""

from support.small_models import hf_twins, make_config, make_rows, make_towers, special

__all__ = ["hf_twins", "make_config", "make_rows", "make_towers", "special"]
