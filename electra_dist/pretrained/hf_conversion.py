"""Convert weights to and from the parameter names of Hugging Face's ELECTRA and ModernBERT models.

Guarantee: `from_hf_discriminator` and `from_hf_generator` invert `to_hf_discriminator` and `to_hf_generator` exactly.
Weights are in fp32. This project's token table ends with rows of padding, which Hugging Face's table does not have.
An export leaves them out, and rows of zeros are added to weights that are read.

How: one table of (our name, Hugging Face's name) per tower, which is the generator or the discriminator. This project
has one fused parameter for query, key and value; it is split and joined. The table of names for the architecture
`modern` is in `hf_modernbert.py`. A `state` of this project holds whole (not partitioned) parameters of both towers,
with or without the objective's prefix `towers.` before their names.

Limits: the tied output projection is not converted, because Hugging Face ties it to the table while loading. The copy
gate, the baseline, Electric's two causal towers and the second head of a discriminator that was trained by joint MLM
(`objective.discriminator_mlm_weight`) have no counterpart in Hugging Face's models and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.errors import UserError
from electra_dist.pretrained import hf_modernbert

State = Mapping[str, torch.Tensor]  # parameter name -> value

# Names of our modules -> names of Hugging Face's modules: in the embeddings, in a layer, and of the detection head.

_EMBEDDINGS = {
    "word": "word_embeddings",
    "position": "position_embeddings",
    "token_type": "token_type_embeddings",
    "layer_norm": "LayerNorm",
}
_LAYER = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "output_norm": "output.LayerNorm",
}
_DISCRIMINATOR_HEAD = {
    "discriminator_head.dense": "discriminator_predictions.dense",
    "discriminator_head.out": "discriminator_predictions.dense_prediction",
}
_TABLE = "embeddings.word.weight"  # our name of the token table
TOKEN_TABLE = f"electra.embeddings.{_EMBEDDINGS['word']}.weight"  # Hugging Face's name of it
_HEADS = {"discriminator": "token_head", "generator": "generator_head"}  # tower -> its head that predicts tokens

OUTPUT_BIAS = "generator_lm_head.bias"  # Hugging Face's name of a token head's output bias
TowerName = Literal["discriminator", "generator"]


def to_hf_discriminator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the discriminator's weights under Hugging Face's names, in fp32 on the host.

    The result is a state dict of ElectraForPreTraining or, if the discriminator was trained to predict tokens (as by
    the objective `mlm`), of ElectraForMaskedLM. With the architecture `modern` it is for ModernBERT's counterparts.
    """
    return _to_hf(state, model, "discriminator")


def to_hf_generator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the generator's weights as a state dict of ElectraForMaskedLM or ModernBertForMaskedLM, fp32 on the host.

    Raises UserError if Hugging Face has no class for this generator (with `model.architecture: modern` only).
    """
    return _to_hf(state, model, "generator")


def from_hf_discriminator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Convert Hugging Face weights of a discriminator to the names of ElectraTowers: embeddings, layers and head.

    The head may be missing. Raises KeyError if the token table, or a query, key or value parameter, is missing.
    """
    return _from_hf(theirs, model, "discriminator")


def from_hf_generator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Convert Hugging Face weights of a generator to the names of ElectraTowers, like `from_hf_discriminator`."""
    return _from_hf(theirs, model, "generator")


def standalone(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return a model's weights, completed so that one tower has all its parameters; in fp32 on the host.

    Generator and discriminator may share all weights, only the embeddings, or nothing. In the result, `embeddings.`
    holds what this tower reads, and `discriminator.` or `generator.` holds its layers, even if they are shared. Other
    parameters, such as heads, keep their names; a prefix `towers.` is removed from all names.
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


def tower_of(model: ModelConfig, tower: TowerName) -> tuple[TowerConfig, int]:
    """Return the shape of the generator or discriminator, and the width of the embedding tables that it reads.

    If the width is not the tower's hidden size, a linear layer (`embeddings_project`) lies between tables and tower.
    """
    if tower == "generator":
        return model.generator, model.generator_embedding_width
    return model.discriminator, model.embedding_size


def hf_backbone_names(model: ModelConfig, tower: TowerName) -> set[str]:
    """Return Hugging Face's names for all parameters in the embeddings and layers of a generator or discriminator."""
    if model.architecture == "modern":
        return hf_modernbert.backbone_names(model, tower)
    names = {theirs for _, theirs in _parameter_names(model, tower) if theirs.startswith("electra.")}
    return names.union(*(parts for _, parts in _qkv_names(model, tower)))


def _module_names(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, str]]:
    """Yield (our name, Hugging Face's name) of every module of a tower except query, key and value."""
    shape, width = tower_of(model, tower)
    for ours, theirs in _EMBEDDINGS.items():
        yield f"embeddings.{ours}", f"electra.embeddings.{theirs}"
    if width != shape.hidden_size:
        yield f"{tower}.embeddings_project", "electra.embeddings_project"
    for layer in range(shape.num_layers):
        for ours, theirs in _LAYER.items():
            yield f"{tower}.layers.{layer}.{ours}", f"electra.encoder.layer.{layer}.{theirs}"
    yield f"{_HEADS[tower]}.dense", "generator_predictions.dense"
    yield f"{_HEADS[tower]}.layer_norm", "generator_predictions.LayerNorm"
    if tower == "discriminator":
        yield from _DISCRIMINATOR_HEAD.items()


def _parameter_names(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, str]]:
    """Yield (our name, Hugging Face's name) of every parameter that a tower may have, except query, key and value."""
    for ours, theirs in _module_names(model, tower):
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", f"{theirs}.{kind}"
    yield f"{_HEADS[tower]}.bias", OUTPUT_BIAS


def _qkv_names(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, list[str]]]:
    """Yield (our fused parameter, Hugging Face's query, key and value in this order) for every layer of a tower."""
    shape, _ = tower_of(model, tower)
    for layer in range(shape.num_layers):
        attention = f"electra.encoder.layer.{layer}.attention.self"
        for kind in ("weight", "bias"):
            parts = [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")]
            yield f"{tower}.layers.{layer}.attention.qkv.{kind}", parts


def _to_hf(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return a tower's weights under Hugging Face's names; no two tensors share memory, as safetensors requires."""
    ours = standalone(state, model, tower)
    if "discriminator_head.dense.weight" in ours:
        # Joint MLM: Hugging Face's ElectraForPreTraining has no place for a second head.
        ours = {name: value for name, value in ours.items() if not name.startswith("token_head.")}
    if model.architecture == "modern":
        obstacle = hf_modernbert.find_obstacle(model) if tower == "generator" else ""
        if obstacle:
            raise UserError(f"the generator cannot be exported: {obstacle}")
        return hf_modernbert.to_hf(ours, model, tower, _HEADS[tower])
    theirs = {}
    # The table of names covers every kind of head, and a state has only some of them.
    for our_name, their_name in _parameter_names(model, tower):
        if our_name in ours:
            theirs[their_name] = ours[our_name].clone()
    for fused_name, part_names in _qkv_names(model, tower):
        query, key, value = ours[fused_name].chunk(3)
        for part_name, part in zip(part_names, (query, key, value), strict=True):
            theirs[part_name] = part.clone()
    theirs[TOKEN_TABLE] = theirs[TOKEN_TABLE][: model.vocab_size].clone()
    return theirs


def _from_hf(theirs: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    if model.architecture == "modern":
        return hf_modernbert.from_hf(theirs, model, tower, _HEADS[tower])
    ours = {}
    for our_name, their_name in _parameter_names(model, tower):
        if their_name in theirs:
            ours[our_name] = theirs[their_name].clone()
    for fused_name, part_names in _qkv_names(model, tower):
        ours[fused_name] = torch.cat([theirs[part_name] for part_name in part_names])
    token_table = ours[_TABLE]
    num_pad_rows = model.padded_vocab_size - token_table.shape[0]
    no_columns = (0, 0)
    rows_at_end = (0, num_pad_rows)
    ours[_TABLE] = torch.nn.functional.pad(token_table, no_columns + rows_at_end)
    return ours
