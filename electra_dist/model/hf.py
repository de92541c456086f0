"""To Hugging Face and back.

Guarantee: `export_discriminator` and `export_generator` write a folder that AutoModel, ElectraForPreTraining,
ElectraForMaskedLM and AutoTokenizer load, with the same logits; `from_hf_discriminator` and `from_hf_generator` invert
the name maps exactly. Weights are written in fp32, the token table without its pad rows.

How: one table of (our name, their name) a tower; the fused query, key, value matmul is split and joined. transformers
is not imported: config.json, model.safetensors and the tokenizer's files are written directly.

Where it stops: the tied output projection is not written (Hugging Face ties it to the table while loading).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import BertWordPieceTokenizer

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.rows import SpecialIds

State = Mapping[str, torch.Tensor]

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
_GENERATOR_HEAD = {
    "generator_head.dense": "generator_predictions.dense",
    "generator_head.layer_norm": "generator_predictions.LayerNorm",
}
_TABLE, _OUTPUT_BIAS = "embeddings.word.weight", "generator_head.bias"


def to_hf_discriminator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The state dict of ElectraForPreTraining; `state` has the names of ElectraTowers or ReplacedTokenDetection."""
    return _to_hf(state, model, "discriminator", model.discriminator, _DISCRIMINATOR_HEAD)


def to_hf_generator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The state dict of ElectraForMaskedLM, without the tied `generator_lm_head.weight`."""
    theirs = _to_hf(state, model, "generator", model.generator, _GENERATOR_HEAD)
    theirs["generator_lm_head.bias"] = _unprefixed(state)[_OUTPUT_BIAS].detach().float().cpu().clone()
    return theirs


def from_hf_discriminator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """ElectraForPreTraining's state dict -> names of ElectraTowers: embeddings, discriminator, its head."""
    return _from_hf(theirs, model, "discriminator", model.discriminator, _DISCRIMINATOR_HEAD)


def from_hf_generator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """ElectraForMaskedLM's state dict -> names of ElectraTowers: embeddings, generator and its head."""
    ours = _from_hf(theirs, model, "generator", model.generator, _GENERATOR_HEAD)
    ours[_OUTPUT_BIAS] = theirs["generator_lm_head.bias"].clone()
    return ours


def export_discriminator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the discriminator as a Hugging Face folder.

    Args:
        state: full (unpartitioned) parameters, with the names of ElectraTowers or ReplacedTokenDetection.
        model: the config that they were trained with.
        special: ids of the special tokens.
        vocab_file: the corpus's vocab.txt.
        lowercase: the corpus's `lowercase`.
        out_dir: made if missing; files of the same names are replaced.
    """
    config = _hf_config(model, model.discriminator, special, "ElectraForPreTraining")
    _write(to_hf_discriminator(state, model), config, vocab_file, lowercase, model.max_positions, out_dir)


def export_generator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the generator as a Hugging Face folder; arguments as of `export_discriminator`."""
    config = _hf_config(model, model.generator, special, "ElectraForMaskedLM")
    _write(to_hf_generator(state, model), config, vocab_file, lowercase, model.max_positions, out_dir)


def _unprefixed(state: State) -> dict[str, torch.Tensor]:
    return {name.removeprefix("towers."): tensor for name, tensor in state.items()}


def _pairs(model: ModelConfig, name: str, tower: TowerConfig, head: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(our module, their module) of everything but the fused attention input."""
    for ours, theirs in _EMBEDDINGS.items():
        yield f"embeddings.{ours}", f"electra.embeddings.{theirs}"
    if model.embedding_size != tower.hidden_size:
        yield f"{name}.embeddings_project", "electra.embeddings_project"
    for i in range(tower.num_layers):
        for ours, theirs in _LAYER.items():
            yield f"{name}.layers.{i}.{ours}", f"electra.encoder.layer.{i}.{theirs}"
    yield from head.items()


def _qkv(name: str, tower: TowerConfig) -> Iterator[tuple[str, list[str]]]:
    """(our fused parameter, their three) of every layer."""
    for i in range(tower.num_layers):
        for kind in ("weight", "bias"):
            parts = [f"electra.encoder.layer.{i}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
            yield f"{name}.layers.{i}.attention.qkv.{kind}", parts


def _to_hf(
    state: State, model: ModelConfig, name: str, tower: TowerConfig, head: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    ours = {key: tensor.detach().float().cpu() for key, tensor in _unprefixed(state).items()}
    theirs = {}
    for our_module, their_module in _pairs(model, name, tower, head):
        for kind in ("weight", "bias"):
            if f"{our_module}.{kind}" in ours:
                theirs[f"{their_module}.{kind}"] = ours[f"{our_module}.{kind}"].clone()
    for fused, parts in _qkv(name, tower):
        theirs.update({part: chunk.clone() for part, chunk in zip(parts, ours[fused].chunk(3), strict=True)})
    table = f"electra.embeddings.{_EMBEDDINGS['word']}.weight"
    theirs[table] = theirs[table][: model.vocab_size].clone()
    return theirs


def _from_hf(
    theirs: State, model: ModelConfig, name: str, tower: TowerConfig, head: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    ours = {}
    for our_module, their_module in _pairs(model, name, tower, head):
        for kind in ("weight", "bias"):
            if f"{their_module}.{kind}" in theirs:
                ours[f"{our_module}.{kind}"] = theirs[f"{their_module}.{kind}"].clone()
    for fused, parts in _qkv(name, tower):
        ours[fused] = torch.cat([theirs[part] for part in parts])
    table = ours[_TABLE]
    ours[_TABLE] = torch.nn.functional.pad(table, (0, 0, 0, model.padded_vocab_size - table.shape[0]))
    return ours


def _hf_config(model: ModelConfig, tower: TowerConfig, special: SpecialIds, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": model.vocab_size,
        "embedding_size": model.embedding_size,
        "hidden_size": tower.hidden_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "intermediate_size": tower.intermediate_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.type_vocab_size,
        "initializer_range": model.initializer_range,
        "layer_norm_eps": model.layer_norm_eps,
        "pad_token_id": special.pad,
        "torch_dtype": "float32",
    }


def _write(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    vocab_file: Path,
    lowercase: bool,
    max_positions: int,
    out_dir: Path,
) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", config)
    shutil.copyfile(vocab_file, out_dir / "vocab.txt")
    tokens = vocab_file.read_text("utf-8").removesuffix("\n").split("\n")
    tokenizer = BertWordPieceTokenizer({token: number for number, token in enumerate(tokens)}, lowercase=lowercase)
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    names = ("pad", "unk", "cls", "sep", "mask")
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": lowercase,
            "model_max_length": max_positions,
            **{f"{name}_token": f"[{name.upper()}]" for name in names},
        },
    )


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n")
