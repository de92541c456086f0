"""Convert weights and shapes of the architecture `modern` to and from those of Hugging Face's ModernBERT.

Guarantee: a tower that predicts tokens becomes a ModernBertForMaskedLM, and a discriminator a
ModernBertForTokenClassification with one label, each with the same logits. `from_hf` inverts `to_hf` exactly.

How: one table of (our name, Hugging Face's name). No parameter is split or joined, because both projects have one
matrix for query, key and value. transformers is not imported.

Limits: in Hugging Face's classes the token table is as wide as the layers, so a generator whose layers have another
width than its table cannot be exported. Hugging Face applies dropout at other places than this project, which matters
only for training with dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.errors import UserError
from electra_dist.model.row_layout import SpecialIds

MODEL_TYPE = "modernbert"
DETECTION_LABELS = {"id2label": {"0": "REPLACED"}, "label2id": {"REPLACED": 0}}  # of a discriminator's config.json
OUTPUT_BIAS = "decoder.bias"  # Hugging Face's name of the output bias of a head that predicts tokens
_TABLE = "embeddings.word.weight"  # the token table
TOKEN_TABLE = "model.embeddings.tok_embeddings.weight"  # Hugging Face's name of it
_FULL, _SLIDING = "full_attention", "sliding_attention"  # types of layers in newer files: global and local ones
# Names of parameters in this project -> in Hugging Face's classes, without the prefixes of tower and layer.
_LAYER = {
    "attention_norm": "attn_norm",
    "attention.qkv": "attn.Wqkv",
    "attention.out": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "gated_expand": "mlp.Wi",
    "contract": "mlp.Wo",
}
_TOKEN_HEAD = {"dense.weight": "head.dense.weight", "layer_norm.weight": "head.norm.weight", "bias": OUTPUT_BIAS}
_DETECTION_HEAD = {
    "dense.weight": "head.dense.weight",
    "layer_norm.weight": "head.norm.weight",
    "out.weight": "classifier.weight",
    "out.bias": "classifier.bias",
}
_ROTARY_BASES = {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"}  # keys of older files
# Values that transformers assumes where config.json lacks the key.
_DEFAULTS = {
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "norm_eps": 1e-5,
}
# Settings of ModernBERT's config that change what a model computes -> the only value that this project supports.
FIXED_SETTINGS = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
}


def find_obstacle(model: ModelConfig) -> str:
    """Return why the generator of a model of the architecture `modern` cannot be exported; "" if it can."""
    width = model.generator_embedding_width
    hidden_size = model.generator.hidden_size
    if width == hidden_size:
        return ""
    return (
        f"the layers of the generator are {hidden_size} wide and its token table is {width} wide, but Hugging Face's "
        f"ModernBERT has one width for both; to export the generator, train a new run with "
        f"model.generator.hidden_size {width} and fewer layers"
    )


def to_hf(
    ours: Mapping[str, torch.Tensor], model: ModelConfig, tower: str, token_head: str
) -> dict[str, torch.Tensor]:
    """Return copies of one tower's weights under Hugging Face's names, without the padding of the token table.

    `ours` holds whole (not partitioned) parameters of the tower and its embeddings, in fp32 on the host. At most one
    head is included: the detection head of a discriminator, otherwise the head that predicts tokens, named
    `token_head`.
    """
    names = dict(_backbone_names(_shape(model, tower), tower))
    if "discriminator_head.dense.weight" in ours and tower == "discriminator":
        names |= {f"discriminator_head.{our_name}": their_name for our_name, their_name in _DETECTION_HEAD.items()}
    elif f"{token_head}.bias" in ours:
        names |= {f"{token_head}.{our_name}": their_name for our_name, their_name in _TOKEN_HEAD.items()}
    theirs = {their_name: ours[our_name].clone() for our_name, their_name in names.items()}
    # Our table may be padded; theirs has the tokens of the vocabulary only.
    theirs[names[_TABLE]] = ours[_TABLE][: model.vocab_size].clone()
    return theirs


def from_hf(
    theirs: Mapping[str, torch.Tensor], model: ModelConfig, tower: str, token_head: str
) -> dict[str, torch.Tensor]:
    """Return Hugging Face weights under this project's names, with rows of zeros that pad the token table.

    The head is included if it predicts tokens or, for the discriminator, classifies them with a single label. Raises
    KeyError if a weight of the embeddings or the layers is missing.
    """
    names = dict(_backbone_names(_shape(model, tower), tower))
    classifier = theirs.get("classifier.weight")
    if OUTPUT_BIAS in theirs:
        names |= {f"{token_head}.{our_name}": their_name for our_name, their_name in _TOKEN_HEAD.items()}
    elif tower == "discriminator" and classifier is not None and len(classifier) == 1:
        names |= {f"discriminator_head.{our_name}": their_name for our_name, their_name in _DETECTION_HEAD.items()}
    ours = {our_name: theirs[their_name].clone() for our_name, their_name in names.items()}
    num_pad_rows = model.padded_vocab_size - len(ours[_TABLE])
    ours[_TABLE] = torch.nn.functional.pad(ours[_TABLE], (0, 0, 0, num_pad_rows))
    return ours


def with_prefix(theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with the names of a model with a head: add `model.` to those of a headless ModernBertModel."""
    is_without_head = any(name.startswith("embeddings.tok_embeddings.") for name in theirs)
    return {f"model.{name}" if is_without_head else name: tensor for name, tensor in theirs.items()}


def backbone_names(model: ModelConfig, tower: str) -> set[str]:
    """Return Hugging Face's names for all parameters in the embeddings and layers of a generator or discriminator."""
    return {their_name for _, their_name in _backbone_names(_shape(model, tower), tower)}


def shape_of_modern(model: ModelConfig, tower: str) -> dict[str, Any]:
    """Return the settings that a ModernBERT's config.json must have for its weights to fit a tower."""
    shape = _shape(model, tower)
    width = model.generator_embedding_width if tower == "generator" else model.embedding_size
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "embedding_size": width,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": model.max_positions,
        "global_attn_every_n_layers": model.global_every,
        "local_attention": model.local_window,
        "global_rope_theta": model.global_rope_theta,
        "local_rope_theta": model.local_rope_theta,
        "norm_eps": model.layer_norm_eps,
    }


def comparable_settings(where: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` (a ModernBERT's config.json), completed so that all keys of `shape_of_modern` exist.

    Newer versions of transformers write a list of layer types instead of `global_attn_every_n_layers`, and the bases
    of the rotary positions in `rope_parameters`; the values of the older keys are then derived from these. A setting
    that this project does not support raises UserError; the path `where` is for its message.
    """
    result = {**_DEFAULTS, **settings, "embedding_size": settings.get("hidden_size")}
    layer_types = settings.get("layer_types")
    if layer_types is not None:
        result["global_attn_every_n_layers"] = _period(where, layer_types, settings.get("num_hidden_layers"))
    for layer_type, parameters in _rotary_parameters(where, settings).items():
        if "rope_theta" in parameters:
            result[_ROTARY_BASES[layer_type]] = parameters["rope_theta"]
    # transformers uses these two keys where they are present; they can only repeat what other keys say.
    window, half_window = result["local_attention"], settings.get("sliding_window")
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
    return result


def model_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a ModernBERT's config.json, from `comparable_settings`, to the fields of the config section `model`.

    A config.json describes one encoder, so both towers of the result get its shape. Raises KeyError if a size is
    missing.
    """
    tower = {
        "hidden_size": settings["hidden_size"],
        "num_layers": settings["num_hidden_layers"],
        "num_heads": settings["num_attention_heads"],
        "intermediate_size": settings["intermediate_size"],
    }
    return {
        "architecture": "modern",
        "vocab_size": settings["vocab_size"],
        "embedding_size": settings["hidden_size"],
        "max_positions": settings["max_position_embeddings"],
        "global_every": settings["global_attn_every_n_layers"],
        "local_window": settings["local_attention"],
        "global_rope_theta": settings["global_rope_theta"],
        "local_rope_theta": settings["local_rope_theta"],
        "layer_norm_eps": settings["norm_eps"],
        "discriminator": tower,
        "generator": tower,
    }


def is_of_a_task(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a ModernBERT that was fine-tuned to classify whole texts.

    The head of such a model must not be read as a pretraining head. If it has a single output, as for a regression,
    its parameters have the same names and shapes as in the head of a discriminator.
    """
    architectures = settings.get("architectures")
    return isinstance(architectures, list) and "ModernBertForSequenceClassification" in architectures


def _rotary_parameters(where: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of rotary positions in config.json by layer type; refuse types other than "default"."""
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


def hf_config(model: ModelConfig, tower: str, special: SpecialIds, architecture: str) -> dict[str, Any]:
    """Return the content of ModernBERT's config.json for one tower; `architecture` is Hugging Face's model class."""
    shape = shape_of_modern(model, tower)
    del shape["embedding_size"]
    return {
        **shape,
        **FIXED_SETTINGS,
        "architectures": [architecture],
        "embedding_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "mlp_dropout": model.hidden_dropout,
        "initializer_range": model.initializer_range,
        "pad_token_id": special.pad,
        "cls_token_id": special.cls,
        "bos_token_id": special.cls,
        "sep_token_id": special.sep,
        "eos_token_id": special.sep,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def _shape(model: ModelConfig, tower: str) -> TowerConfig:
    return model.generator if tower == "generator" else model.discriminator


def _backbone_names(shape: TowerConfig, tower: str) -> Iterator[tuple[str, str]]:
    """Yield (our name, Hugging Face's name) of every parameter in the embeddings and the layers of a tower."""
    yield _TABLE, TOKEN_TABLE
    yield "embeddings.layer_norm.weight", "model.embeddings.norm.weight"
    for layer in range(shape.num_layers):
        for ours, theirs in _LAYER.items():
            # The embeddings end with a LayerNorm, so ModernBERT has none before the attention of the first layer.
            is_left_out = layer == 0 and ours == "attention_norm"
            if not is_left_out:
                yield f"{tower}.layers.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"
    yield f"{tower}.final_norm.weight", "model.final_norm.weight"


def _period(where: str, layer_types: object, num_layers: object) -> int:
    """Return the n for which the layers 0, n, 2n, ... have global attention, and all other layers local windows."""
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
