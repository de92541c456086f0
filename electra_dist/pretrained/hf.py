"""Translate weights to and from those of Hugging Face's ELECTRA and ModernBERT, by one table for each.

Guarantee: `from_hf` inverts `to_hf` exactly, and a tower under Hugging Face's names has the same logits there. Weights
are in fp32. A generator, or a discriminator that predicts tokens, becomes a model ForMaskedLM; any other discriminator
becomes an ElectraForPreTraining or a ModernBertForTokenClassification with one label. This project's token table ends
with rows of padding, which Hugging Face's table does not have: an export leaves them out, and rows of zeros are added
to weights that are read.

How: a `Family` is one table, which both directions read: (our name, Hugging Face's name) of parameters and, for
`hf_settings.py`, of the settings in config.json. A `state` of this project holds whole (not partitioned) parameters of
both towers, generator and discriminator, with or without the objective's prefix `towers.` before their names.
transformers is not imported.

Limits: the tied output projection is not converted, because Hugging Face ties it to the table while loading. The copy
gate, the baseline and Electric's two causal towers have no counterpart in Hugging Face's models and are left out. Of
a discriminator with two heads (`objective.discriminator_mlm_weight`) the one that detects is converted; `export.py`
writes the other one as a model of its own. In ModernBERT the token table is as wide as the layers, so a generator with
two widths cannot be exported. Hugging Face applies dropout at other places in ModernBERT than this project, which
matters only for training with dropout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.errors import UserError

State = Mapping[str, torch.Tensor]  # parameter name -> value
TowerName = Literal["discriminator", "generator"]
DETECTION_LABELS = {"id2label": {"0": "REPLACED"}, "label2id": {"REPLACED": 0}}  # of a ModernBERT discriminator
_TABLE = "embeddings.word.weight"  # our name of the token table
_TOKEN_HEADS = {"discriminator": "token_head", "generator": "generator_head"}  # tower -> its head that predicts tokens


class Family(NamedTuple):
    """Hugging Face's names for one architecture, and the settings of its config.json.

    Tables of parameters are {our name: Hugging Face's name}. A name such as "self.{query,key}.weight" stands for
    several parameters, which ours holds one below the other.
    """

    model_type: str
    prefix: str  # of the names of embeddings and layers, in a model with a head
    embeddings: dict[str, str]
    layers: str  # name of the list of layers
    layer: dict[str, str]
    tower: dict[str, str]  # parameters of the tower outside its layers
    token_head: dict[str, str]
    detection_head: dict[str, str]
    token_mark: str  # Hugging Face's name of a parameter that only weights with a head that predicts tokens have
    tied_output: str  # Hugging Face's name of the output matrix that is tied to the token table
    shape: dict[str, str]  # key that decides shapes or the function -> field of ModelConfig or TowerConfig
    training: dict[str, str]  # key that matters in training only -> field of ModelConfig
    special: dict[str, str]  # key -> field of SpecialIds
    defaults: dict[str, Any]  # values that transformers assumes where config.json lacks the key
    fixed: dict[str, Any]  # keys that change what a model computes -> the only value that is supported
    written: dict[str, Any]  # further entries of an exported config.json
    token_class: str  # class of a tower that predicts tokens
    detection_class: str  # class of any other discriminator

    @property
    def token_table(self) -> str:
        """Return Hugging Face's name of the token table."""
        return f"{self.prefix}embeddings.{self.embeddings['word.weight']}"


def _with_bias(modules: dict[str, str]) -> dict[str, str]:
    """Return {our name: Hugging Face's name} of the parameters weight and bias, from that of their modules."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


TOWER_SHAPE = {  # key of config.json -> field of TowerConfig
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}
_MODERNBERT_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
}
ELECTRA = Family(
    model_type="electra",
    prefix="electra.",
    embeddings={
        "word.weight": "word_embeddings.weight",
        "position.weight": "position_embeddings.weight",
        "token_type.weight": "token_type_embeddings.weight",
        **_with_bias({"layer_norm": "LayerNorm"}),
    },
    layers="encoder.layer",
    layer={
        "attention.qkv.weight": "attention.self.{query,key,value}.weight",
        "attention.qkv.bias": "attention.self.{query,key,value}.bias",
        **_with_bias(
            {
                "attention.out": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                "expand": "intermediate.dense",
                "contract": "output.dense",
                "output_norm": "output.LayerNorm",
            }
        ),
    },
    tower=_with_bias({"embeddings_project": "embeddings_project"}),
    token_head={
        **_with_bias({"dense": "generator_predictions.dense", "layer_norm": "generator_predictions.LayerNorm"}),
        "bias": "generator_lm_head.bias",
    },
    detection_head=_with_bias(
        {"dense": "discriminator_predictions.dense", "out": "discriminator_predictions.dense_prediction"}
    ),
    token_mark="generator_predictions.dense.weight",
    tied_output="generator_lm_head.weight",
    shape={
        "vocab_size": "vocab_size",
        "embedding_size": "embedding_size",
        "type_vocab_size": "type_vocab_size",
        **TOWER_SHAPE,
        "layer_norm_eps": "layer_norm_eps",
        "max_position_embeddings": "max_positions",
    },
    training={
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "initializer_range",
    },
    special={"pad_token_id": "pad"},
    defaults={"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    fixed={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    written={"hidden_act": "gelu"},
    token_class="ElectraForMaskedLM",
    detection_class="ElectraForPreTraining",
)
MODERNBERT = Family(
    model_type="modernbert",
    prefix="model.",
    embeddings={"word.weight": "tok_embeddings.weight", "layer_norm.weight": "norm.weight"},
    layers="layers",
    layer={
        "attention_norm.weight": "attn_norm.weight",
        "attention.qkv.weight": "attn.Wqkv.weight",
        "attention.out.weight": "attn.Wo.weight",
        "feed_forward_norm.weight": "mlp_norm.weight",
        "gated_expand.weight": "mlp.Wi.weight",
        "contract.weight": "mlp.Wo.weight",
    },
    tower={"final_norm.weight": "final_norm.weight"},
    token_head={
        "dense.weight": "head.dense.weight",
        "layer_norm.weight": "head.norm.weight",
        "bias": "decoder.bias",
    },
    detection_head={
        "dense.weight": "head.dense.weight",
        "layer_norm.weight": "head.norm.weight",
        "out.weight": "classifier.weight",
        "out.bias": "classifier.bias",
    },
    token_mark="decoder.bias",
    tied_output="decoder.weight",
    shape={
        "vocab_size": "vocab_size",
        "embedding_size": "embedding_size",
        **TOWER_SHAPE,
        "max_position_embeddings": "max_positions",
        "global_attn_every_n_layers": "global_every",
        "local_attention": "local_window",
        "global_rope_theta": "global_rope_theta",
        "local_rope_theta": "local_rope_theta",
        "norm_eps": "layer_norm_eps",
    },
    training={
        "embedding_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "mlp_dropout": "hidden_dropout",
        "initializer_range": "initializer_range",
    },
    special={
        "pad_token_id": "pad",
        "cls_token_id": "cls",
        "bos_token_id": "cls",
        "sep_token_id": "sep",
        "eos_token_id": "sep",
    },
    defaults={
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "norm_eps": 1e-5,
    },
    fixed=_MODERNBERT_FIXED,
    written={**_MODERNBERT_FIXED, "tie_word_embeddings": True},
    token_class="ModernBertForMaskedLM",
    detection_class="ModernBertForTokenClassification",
)


def family_of(model: ModelConfig) -> Family:
    """Return the table of Hugging Face's names for a model of this architecture."""
    return MODERNBERT if model.architecture == "modern" else ELECTRA


def find_obstacle(model: ModelConfig) -> str:
    """Return why Hugging Face has no class for the generator of a model; "" if it has one."""
    width = model.generator_embedding_width
    hidden_size = model.generator.hidden_size
    if model.architecture == "bert" or width == hidden_size:
        return ""
    return (
        f"the layers of the generator are {hidden_size} wide and its token table is {width} wide, but Hugging Face's "
        f"ModernBERT has one width for both; to export the generator, train a new run with "
        f"model.generator.hidden_size {width} and fewer layers"
    )


def to_hf(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return the weights of a tower, its embeddings and its head under Hugging Face's names, in fp32 on the host.

    No two tensors share memory, as safetensors requires. Raises UserError if Hugging Face has no class for this
    generator.
    """
    obstacle = find_obstacle(model) if tower == "generator" else ""
    if obstacle:
        raise UserError(f"the generator cannot be exported: {obstacle}")
    ours = standalone(state, model, tower)
    names = _backbone_names(model, tower)
    # With joint MLM there are two heads, but Hugging Face's classes have a place for one.
    if tower == "discriminator" and "discriminator_head.dense.weight" in ours:
        names |= _head_names(model, "discriminator_head")
    elif f"{_TOKEN_HEADS[tower]}.bias" in ours:
        names |= _head_names(model, _TOKEN_HEADS[tower])
    ours[_TABLE] = ours[_TABLE][: model.vocab_size]
    theirs = {}
    for our_name, their_names in names.items():
        parts = ours[our_name].chunk(len(their_names))
        for their_name, part in zip(their_names, parts, strict=True):
            theirs[their_name] = part.clone()
    return theirs


def from_hf(theirs: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Convert Hugging Face weights to the names of ElectraTowers: embeddings, layers and, if there is one, the head.

    A ModernBERT's head is included if it predicts tokens or, for the discriminator, classifies them with a single
    label. Raises KeyError if the token table, a query, key or value parameter, or any weight of a ModernBERT is
    missing.
    """
    hf = family_of(model)
    names = _backbone_names(model, tower)
    classifier = theirs.get("classifier.weight")
    if hf is ELECTRA:
        names |= _head_names(model, _TOKEN_HEADS[tower])
        if tower == "discriminator":
            names |= _head_names(model, "discriminator_head")
        # Others than query, key and value may be missing.
        names = {ours: parts for ours, parts in names.items() if len(parts) > 1 or parts[0] in theirs}
    elif hf.token_mark in theirs:
        names |= _head_names(model, _TOKEN_HEADS[tower])
    elif tower == "discriminator" and classifier is not None and classifier.shape[:1] == (1,):
        names |= _head_names(model, "discriminator_head")
    ours = {}
    for our_name, their_names in names.items():
        parts = [theirs[their_name] for their_name in their_names]
        ours[our_name] = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
    num_pad_rows = model.padded_vocab_size - len(ours[_TABLE])
    no_columns = (0, 0)
    rows_at_end = (0, num_pad_rows)
    ours[_TABLE] = torch.nn.functional.pad(ours[_TABLE], no_columns + rows_at_end)
    return ours


def standalone(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return a model's weights so that one tower finds all of its own, even those that it shares; fp32 on the host.

    Generator and discriminator may share all weights, only the embeddings, or nothing. In the result, `embeddings.`
    holds what this tower reads, and `discriminator.` or `generator.` holds its layers. Other parameters, such as
    heads, keep their names; a prefix `towers.` is removed from all names.
    """
    weights = {name.removeprefix("towers."): tensor.detach().float().cpu() for name, tensor in state.items()}
    if tower == "generator" and model.sharing == "all":
        # The layers are stored once, as the discriminator's.
        shared = {name: tensor for name, tensor in weights.items() if name.startswith("discriminator.")}
        for name, tensor in shared.items():
            weights["generator." + name.removeprefix("discriminator.")] = tensor
    if tower == "discriminator":
        # There are such parameters only if the discriminator does not read the generator's embeddings as they are.
        own_names = [name for name in weights if name.startswith("discriminator_embeddings.")]
        for own_name in own_names:
            name = own_name.removeprefix("discriminator_")
            if model.sharing == "gdes" and "layer_norm" not in own_name:
                weights[name] = weights[name] + weights[own_name]  # stored as a difference to the generator's table
            else:
                weights[name] = weights[own_name]
    return weights


def submodules(state: State, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the parameters of the submodules in `names`, which maps their names in `state` to those in the result."""
    found = {}
    for name, tensor in state.items():
        module, _, own_name = name.partition(".")
        if module in names:
            found[f"{names[module]}.{own_name}"] = tensor
    return found


def tower_of(model: ModelConfig, tower: TowerName) -> tuple[TowerConfig, int]:
    """Return the shape of the generator or discriminator, and the width of the embedding tables that it reads.

    If the width is not the tower's hidden size, a linear layer (`embeddings_project`) lies between tables and tower.
    """
    if tower == "generator":
        return model.generator, model.generator_embedding_width
    return model.discriminator, model.embedding_size


def hf_backbone_names(model: ModelConfig, tower: TowerName) -> set[str]:
    """Return Hugging Face's names of all parameters in the embeddings and layers of a generator or discriminator."""
    return set().union(*_backbone_names(model, tower).values())


def with_prefix(theirs: State) -> dict[str, torch.Tensor]:
    """Rename Hugging Face weights as in a model with a head, where names of the encoder's parameters have a prefix."""
    is_modern = any("tok_embeddings" in name for name in theirs)
    if is_modern:
        has_prefix = not any(name.startswith("embeddings.tok_embeddings.") for name in theirs)
    else:
        has_prefix = any(name.startswith(ELECTRA.prefix) for name in theirs)
    prefix = MODERNBERT.prefix if is_modern else ELECTRA.prefix
    return {name if has_prefix else f"{prefix}{name}": tensor for name, tensor in theirs.items()}


def _backbone_names(model: ModelConfig, tower: TowerName) -> dict[str, list[str]]:
    """Return {our parameter: Hugging Face's parameters} of the embeddings and layers of a tower."""
    hf = family_of(model)
    shape, width = tower_of(model, tower)
    names = {f"embeddings.{ours}": f"embeddings.{theirs}" for ours, theirs in hf.embeddings.items()}
    for layer in range(shape.num_layers):
        for ours, theirs in hf.layer.items():
            names[f"{tower}.layers.{layer}.{ours}"] = f"{hf.layers}.{layer}.{theirs}"
    names |= {f"{tower}.{ours}": theirs for ours, theirs in hf.tower.items()}
    if hf is MODERNBERT:
        # The embeddings end with a LayerNorm, so ModernBERT has none before the attention of the first layer.
        del names[f"{tower}.layers.0.attention_norm.weight"]
    elif width == shape.hidden_size:
        names = {ours: theirs for ours, theirs in names.items() if not theirs.startswith("embeddings_project.")}
    return {ours: _expand(f"{hf.prefix}{theirs}") for ours, theirs in names.items()}


def _head_names(model: ModelConfig, head: str) -> dict[str, list[str]]:
    """Return {our parameter: [Hugging Face's parameter]} of a head; `head` is its name in ElectraTowers."""
    hf = family_of(model)
    table = hf.detection_head if head == "discriminator_head" else hf.token_head
    return {f"{head}.{ours}": [theirs] for ours, theirs in table.items()}


def _expand(name: str) -> list[str]:
    """Return the names that a name in a `Family` stands for: "a.{b,c}" for a.b and a.c, any other for itself."""
    match = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", name)
    if match is None:
        return [name]
    start, parts, end = match.groups()
    return [f"{start}{part}{end}" for part in parts.split(",")]
