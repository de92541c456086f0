"""Read the shape of a model in a local folder of Hugging Face's format.

Limits: models of type `electra` with absolute positions, and of type `modernbert`. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.pretrained import hf_modernbert
from electra_dist.store.json_file import read_json_object

_LARGEST_SIZE = 1 << 24  # in a config.json; no vocabulary and no layer has as many entries
_AGAIN = "download or export the model again"  # next step in messages about a damaged file


def read_hugging_face_model_config(folder: Path) -> ModelConfig:
    """Return the section `model` of this project's config for a Hugging Face model of the given shape.

    The folder holds one tower, whereas the section describes two: generator and discriminator get the same shape.

    Args:
        folder: the model's folder, whose config.json is read.

    Raises:
        UserError: it is neither an ELECTRA model with absolute positions nor a ModernBERT, or its shape is incomplete
            or impossible.
    """
    settings = read_json_object(folder / "config.json", _AGAIN)
    model_type = settings.get("model_type")
    positions = settings.get("position_embedding_type", "absolute")
    is_electra = model_type == "electra" and positions == "absolute"
    is_modern = model_type == hf_modernbert.MODEL_TYPE
    if not is_electra and not is_modern:
        raise UserError(
            f"{folder}/config.json: neither an ELECTRA model with absolute positions nor a ModernBERT (model_type "
            f"{model_type}, position_embedding_type {positions}); name the folder of another model"
        )
    sizes = [value for value in settings.values() if isinstance(value, int)]
    if max(sizes, default=0) > _LARGEST_SIZE:
        raise UserError(f"{folder}/config.json: the size {max(sizes)} is impossible; {_AGAIN}")
    try:
        if is_modern:
            fields = hf_modernbert.model_section(str(folder / "config.json"), settings)
        else:
            fields = _electra_section(settings)
        return ModelConfig.model_validate(fields)
    except (KeyError, ValidationError) as error:
        reason = str(error).replace("\n", " ")
        raise UserError(
            f"{folder}/config.json: the shape of the model is incomplete or impossible: {reason}; "
            f"copy the model's own config.json there"
        ) from None


def _electra_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the config.json of an ELECTRA model to the fields of the config section `model` of this project.

    A config.json describes one encoder, so both towers of the result get its shape.

    Args:
        settings: content of config.json.

    Returns:
        Name of the field -> value, as `ModelConfig.model_validate` expects it.

    Raises:
        KeyError: config.json lacks a size of the model.
    """
    tower = {
        "hidden_size": settings["hidden_size"],
        "num_layers": settings["num_hidden_layers"],
        "num_heads": settings["num_attention_heads"],
        "intermediate_size": settings["intermediate_size"],
    }
    return {
        "vocab_size": settings["vocab_size"],
        "embedding_size": settings["embedding_size"],
        "max_positions": settings["max_position_embeddings"],
        "type_vocab_size": settings.get("type_vocab_size", 2),
        "layer_norm_eps": settings.get("layer_norm_eps", 1e-12),
        "discriminator": tower,
        "generator": tower,
    }
