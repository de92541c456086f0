"""Translate the settings of a model to and from Hugging Face's config.json, by the tables of `hf.py`.

Guarantee: a setting that changes what a model computes is translated or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.pretrained.hf import ELECTRA, MODERNBERT, TOWER_SHAPE, Family, TowerName, family_of, tower_of

_FULL, _SLIDING = "full_attention", "sliding_attention"  # types of layers in newer files: global and local ones
_CLASSES_FOR_TEXTS = {"ModernBertForSequenceClassification", "ModernBertForMultipleChoice"}
_ROTARY_BASES = {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"}  # keys of older files


def shape_of(model: ModelConfig, tower: TowerName) -> dict[str, Any]:
    """Return the settings that a Hugging Face config.json must have for its weights to fit a tower, by its own keys.

    They decide the shapes of the weights and the function that the tower computes. The number of positions is the
    smallest that fits: weights may have more, which are cut off.
    """
    hf = family_of(model)
    shape, width = tower_of(model, tower)
    fields = {**dict(model), **dict(shape), "embedding_size": width}
    return {"model_type": hf.model_type, **{theirs: fields[ours] for theirs, ours in hf.shape.items()}}


def hf_config(model: ModelConfig, tower: TowerName, special: SpecialIds, architecture: str) -> dict[str, Any]:
    """Return the content of config.json for one tower; `architecture` is Hugging Face's model class."""
    hf = family_of(model)
    config = shape_of(model, tower)
    if hf is MODERNBERT:
        del config["embedding_size"]  # there it is the hidden size
    trained = model.for_generator if tower == "generator" else model
    config |= {theirs: getattr(trained, ours) for theirs, ours in hf.training.items()}
    config |= {theirs: getattr(special, ours) for theirs, ours in hf.special.items()}
    return {**config, **hf.written, "architectures": [architecture], "torch_dtype": "float32"}


def model_section(settings: Mapping[str, Any], hf: Family) -> dict[str, Any]:
    """Convert the settings of a config.json, from `comparable_settings`, to fields of the config section `model`.

    A config.json describes one encoder, so both towers of the result get its shape. Raises KeyError if a size is
    missing.
    """
    tower = {ours: settings[theirs] for theirs, ours in TOWER_SHAPE.items()}
    fields = {ours: settings[theirs] for theirs, ours in hf.shape.items() if theirs not in TOWER_SHAPE}
    architecture = "modern" if hf is MODERNBERT else "bert"
    return {"architecture": architecture, **fields, "discriminator": tower, "generator": tower}


def comparable_settings(where: str, settings: Mapping[str, Any], hf: Family) -> dict[str, Any]:
    """Complete the settings of a config.json: with every key that decides shapes, as `shape_of` returns them.

    Newer versions of transformers write a list of layer types instead of `global_attn_every_n_layers`, and the bases
    of the rotary positions in `rope_parameters`; the values of the older keys are then derived from these. Raises
    UserError, which begins with the path `where`, for a setting that this project does not support.
    """
    result = {**hf.defaults, **settings}
    if hf is ELECTRA:
        return result
    result["embedding_size"] = settings.get("hidden_size")
    layer_types = settings.get("layer_types")
    if layer_types is not None:
        result["global_attn_every_n_layers"] = _period(where, layer_types, settings.get("num_hidden_layers"))
    for layer_type, parameters in _rotary_parameters(where, settings).items():
        if "rope_theta" in parameters:
            result[_ROTARY_BASES[layer_type]] = parameters["rope_theta"]
    _check_repetitions(where, settings, result["local_attention"])
    return result


def _check_repetitions(where: str, settings: Mapping[str, Any], window: object) -> None:
    """Raise UserError if `sliding_window` or `head_dim` contradicts other keys, because transformers reads the two."""
    half_window = settings.get("sliding_window")
    if "sliding_window" in settings and (not isinstance(window, int) or half_window != window // 2):
        raise UserError(
            f"{where}: sliding_window is {half_window}, which is not half of local_attention {window}; name another "
            f"model"
        )
    head_dim, hidden_size, num_heads = (
        settings.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads")
    )
    are_integers = all(isinstance(size, int) for size in (head_dim, hidden_size, num_heads))
    if head_dim and not (are_integers and head_dim * num_heads == hidden_size):
        raise UserError(
            f"{where}: head_dim is {head_dim}, which is not hidden_size {hidden_size} divided by num_attention_heads "
            f"{num_heads}; name another model"
        )


def is_of_a_task(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a ModernBERT that was fine-tuned to classify or compare whole texts.

    The head of such a model must not be read as a pretraining head. If it has a single output, as for a regression or
    the choice among answers, its parameters have the same names and shapes as in the head of a discriminator.
    """
    architectures = settings.get("architectures")
    return isinstance(architectures, list) and not _CLASSES_FOR_TEXTS.isdisjoint(map(str, architectures))


def _rotary_parameters(where: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return `rope_parameters` of a config.json, kind of layer -> settings of its rotary positions; {} without it.

    Raises UserError for a `rope_type` other than "default".
    """
    given = settings.get("rope_parameters")
    if given is None:
        return {}
    if not isinstance(given, dict) or not given.keys() <= _ROTARY_BASES.keys():
        raise UserError(
            f"{where}: rope_parameters is {given}, but only an object with entries {_FULL} and {_SLIDING} is "
            f"supported; name another model"
        )
    for layer_type, parameters in given.items():
        if not isinstance(parameters, dict):
            raise UserError(
                f"{where}: rope_parameters has {parameters} for {layer_type}, which is no object; copy the model's "
                f"own config.json there"
            )
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type != "default":
            raise UserError(
                f"{where}: rope_parameters: rope_type of {layer_type} is {rope_type}, but only default is supported; "
                f"name another model"
            )
    return given


def _period(where: str, layer_types: object, num_layers: object) -> int:
    """Return n if exactly the layers 0, n, 2n, ... have global attention; raise UserError if there is no such n."""
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise UserError(
            f"{where}: layer_types is no list of one type for each of the num_hidden_layers {num_layers}; copy the "
            f"model's own config.json there"
        )
    for period in range(1, len(layer_types) + 1):
        expected = [_SLIDING if layer % period else _FULL for layer in range(len(layer_types))]
        if layer_types == expected:
            return period
    raise UserError(
        f"{where}: the layers of type full_attention in layer_types are not evenly spaced from the first layer on, "
        f"which is not supported; name another model"
    )
