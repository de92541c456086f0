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
# Keys of config.json that change what a model computes, or which weights it has -> the only value that is supported.
# Left out are keys that are read, and those without effect on the states and the pretraining heads: settings of
# training (dropout, initialisation), of a task's head (labels, pooling, summary_*) and of transformers' own program.
_FIXED_SETTINGS: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "pruned_heads": {},
    "rope_scaling": None,
    "per_layer_config": None,
    "quantization_config": None,
}
_FIXED_ELECTRA_SETTINGS = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
_ELECTRA_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of a Hugging Face model's config.json; missing keys get the values that transformers assumes.

    The key `dtype` names the type to which transformers rounds the weights, or is None. Raises UserError if the model
    is of another type, or if a setting makes it compute something that this project does not support.
    """
    where = f"{folder}/config.json"
    given = read_json_object(folder / "config.json", _AGAIN)
    model_type = given.get("model_type")
    if model_type == hf_modernbert.MODEL_TYPE:
        settings = hf_modernbert.comparable_settings(where, given)
        fixed = _FIXED_SETTINGS | hf_modernbert.FIXED_SETTINGS
    elif model_type == "electra":
        settings = _ELECTRA_DEFAULTS | given
        fixed = _FIXED_SETTINGS | _FIXED_ELECTRA_SETTINGS
    else:
        raise UserError(
            f"{where}: neither an ELECTRA model with absolute positions nor a ModernBERT, because model_type is "
            f"{model_type}; name the folder of another model"
        )
    for key, supported in fixed.items():
        value = given.get(key, supported)
        if value != supported:
            raise UserError(f"{where}: {key} is {value}, but only {supported} is supported; name another model")
    dtype_key = "torch_dtype" if given.get("dtype") is None else "dtype"
    settings["dtype"] = given.get(dtype_key)
    if settings["dtype"] not in (None, *_DTYPES):
        raise UserError(
            f"{where}: {dtype_key} is {settings['dtype']}, but only {', '.join(_DTYPES)} are supported; name another "
            f"model"
        )
    return settings


def read_hugging_face_model_config(folder: Path) -> ModelConfig:
    """Return the config section `model` that describes the Hugging Face model in a folder.

    The folder holds one tower, whereas the section describes two: generator and discriminator get the same shape.
    """
    settings = read_settings(folder)
    sizes = [value for value in settings.values() if isinstance(value, int)]
    if max(sizes, default=0) > _LARGEST_SIZE:
        raise UserError(f"{folder}/config.json: the size {max(sizes)} is impossible; {_AGAIN}")
    try:
        if settings["model_type"] == hf_modernbert.MODEL_TYPE:
            fields = hf_modernbert.model_section(settings)
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
    """Convert an ELECTRA model's config.json to fields of the config section `model`; KeyError if a size is absent."""
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
        "type_vocab_size": settings["type_vocab_size"],
        "layer_norm_eps": settings["layer_norm_eps"],
        "discriminator": tower,
        "generator": tower,
    }
