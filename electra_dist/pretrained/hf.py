"""To Hugging Face and back.

Guarantee: `export_towers` writes folders that AutoModel, ElectraForPreTraining, ElectraForMaskedLM and AutoTokenizer
load, with the same logits, whatever the towers share and whatever the large one learnt; `from_hf_discriminator` and
`from_hf_generator` invert the name maps exactly. Weights are in fp32, the token table without its pad rows.

How: one table of (our name, their name) a tower; the fused query, key, value matmul is split and joined. transformers
is not imported: config.json, model.safetensors and the tokenizer's files are written directly.

Where it stops: the tied output projection is not written (Hugging Face ties it to the table while loading). The copy
gate and the baseline have no place there, and Electric's two causal towers are no Hugging Face model: left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

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
_TABLE, _OUTPUT_BIAS = "embeddings.word.weight", "generator_lm_head.bias"
_HEADS = {"discriminator": "token_head", "generator": "generator_head"}  # that predict tokens
TowerName = Literal["discriminator", "generator"]


def to_hf_discriminator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The state dict of ElectraForPreTraining; of ElectraForMaskedLM where the large tower predicts tokens.

    `state` has the names of ElectraTowers or of an objective around them.
    """
    return _to_hf(state, model, "discriminator")


def to_hf_generator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The state dict of ElectraForMaskedLM, without the tied `generator_lm_head.weight`."""
    return _to_hf(state, model, "generator")


def from_hf_discriminator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The state dict of ElectraForPreTraining or ForMaskedLM -> names of ElectraTowers: embeddings, tower, head."""
    return _from_hf(theirs, model, "discriminator")


def from_hf_generator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """ElectraForMaskedLM's state dict -> names of ElectraTowers: embeddings, generator and its head."""
    return _from_hf(theirs, model, "generator")


def standalone(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """The state with fp32 `embeddings.` that this tower reads and `{tower}.` of its own, whatever the towers share."""
    ours = {name.removeprefix("towers."): tensor.detach().float().cpu() for name, tensor in state.items()}
    if tower == "generator" and model.sharing == "all":
        layers = {name: tensor for name, tensor in ours.items() if name.startswith("discriminator.")}
        ours |= {name.replace("discriminator.", "generator.", 1): tensor for name, tensor in layers.items()}
    if tower == "discriminator":
        for name in [name for name in ours if name.startswith("discriminator_embeddings.")]:
            read = name.removeprefix("discriminator_")
            is_difference = model.sharing == "gdes" and "layer_norm" not in name
            ours[read] = ours[read] + ours[name] if is_difference else ours[name]
    return ours


def export_towers(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> dict[str, Path]:
    """Write OUT_DIR/discriminator and, where there is one that Hugging Face knows, OUT_DIR/generator.

    Arguments as of `export_discriminator`; returns name -> folder.
    """
    folders = {"discriminator": out_dir / "discriminator"}
    export_discriminator(state, model, special, vocab_file, lowercase, folders["discriminator"])
    names = {name.removeprefix("towers.").partition(".")[0] for name in state}
    if "generator_head" in names and "generator_reverse" not in names:
        folders["generator"] = out_dir / "generator"
        export_generator(state, model, special, vocab_file, lowercase, folders["generator"])
    return folders


def export_discriminator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the discriminator as a Hugging Face folder.

    Args:
        state: full (unpartitioned) parameters, with the names of ElectraTowers or of an objective around them.
        model: the config that they were trained with.
        special: ids of the special tokens.
        vocab_file: the corpus's vocab.txt.
        lowercase: the corpus's `lowercase`.
        out_dir: made if missing; files of the same names are replaced.
    """
    tensors = to_hf_discriminator(state, model)
    architecture = "ElectraForMaskedLM" if _OUTPUT_BIAS in tensors else "ElectraForPreTraining"
    config = _hf_config(model, "discriminator", special, architecture)
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def export_generator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the generator as a Hugging Face folder; arguments as of `export_discriminator`."""
    config = _hf_config(model, "generator", special, "ElectraForMaskedLM")
    _write(to_hf_generator(state, model), config, vocab_file, lowercase, model.max_positions, out_dir)


def tower_of(model: ModelConfig, tower: TowerName) -> tuple[TowerConfig, int]:
    """Its shape, and the width of the tables that it reads."""
    if tower == "generator":
        return model.generator, model.generator_embedding_width
    return model.discriminator, model.embedding_size


def _pairs(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, str]]:
    """(our module, their module) of everything but the fused attention input."""
    shape, width = tower_of(model, tower)
    for ours, theirs in _EMBEDDINGS.items():
        yield f"embeddings.{ours}", f"electra.embeddings.{theirs}"
    if width != shape.hidden_size:
        yield f"{tower}.embeddings_project", "electra.embeddings_project"
    for i in range(shape.num_layers):
        for ours, theirs in _LAYER.items():
            yield f"{tower}.layers.{i}.{ours}", f"electra.encoder.layer.{i}.{theirs}"
    yield f"{_HEADS[tower]}.dense", "generator_predictions.dense"
    yield f"{_HEADS[tower]}.layer_norm", "generator_predictions.LayerNorm"
    if tower == "discriminator":
        yield from _DISCRIMINATOR_HEAD.items()


def _parameters(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, str]]:
    """(our parameter, theirs) of everything but the fused attention input; not every one is in every state."""
    for ours, theirs in _pairs(model, tower):
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", f"{theirs}.{kind}"
    yield f"{_HEADS[tower]}.bias", _OUTPUT_BIAS


def _qkv(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, list[str]]]:
    """(our fused parameter, their three) of every layer."""
    for i in range(tower_of(model, tower)[0].num_layers):
        for kind in ("weight", "bias"):
            parts = [f"electra.encoder.layer.{i}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
            yield f"{tower}.layers.{i}.attention.qkv.{kind}", parts


def _to_hf(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    ours = standalone(state, model, tower)
    theirs = {their: ours[our].clone() for our, their in _parameters(model, tower) if our in ours}
    for fused, parts in _qkv(model, tower):
        theirs.update({part: chunk.clone() for part, chunk in zip(parts, ours[fused].chunk(3), strict=True)})
    table = f"electra.embeddings.{_EMBEDDINGS['word']}.weight"
    theirs[table] = theirs[table][: model.vocab_size].clone()
    return theirs


def _from_hf(theirs: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    ours = {our: theirs[their].clone() for our, their in _parameters(model, tower) if their in theirs}
    for fused, parts in _qkv(model, tower):
        ours[fused] = torch.cat([theirs[part] for part in parts])
    table = ours[_TABLE]
    ours[_TABLE] = torch.nn.functional.pad(table, (0, 0, 0, model.padded_vocab_size - table.shape[0]))
    return ours


def _hf_config(model: ModelConfig, tower: TowerName, special: SpecialIds, architecture: str) -> dict[str, Any]:
    shape, width = tower_of(model, tower)
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": model.vocab_size,
        "embedding_size": width,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
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
