"""Write the towers of a run, or a fine-tuned model, as folders that Hugging Face's classes load.

Guarantee: AutoModel, ElectraForPreTraining, ElectraForMaskedLM, their counterparts for ModernBERT, and AutoTokenizer
load these folders with the same logits, whichever weights generator and discriminator share and whichever objective
trained them. Weights are in fp32.

How: transformers is not imported: config.json, model.safetensors and the tokenizer's files are written directly.
`hf_conversion.py` translates the names of the parameters.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from tokenizers import BertWordPieceTokenizer

from electra_dist.config import ModelConfig
from electra_dist.model.row_layout import SpecialIds
from electra_dist.pretrained import hf_modernbert
from electra_dist.pretrained.hf_conversion import (
    OUTPUT_BIAS,
    State,
    TowerName,
    to_hf_discriminator,
    to_hf_generator,
    tower_of,
)
from electra_dist.store.atomic_files import replacing
from electra_dist.store.regular_files import read_regular
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

_SPECIAL_TOKENS = ("pad", "unk", "cls", "sep", "mask")


def export_towers(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> dict[str, Path]:
    """Write the Hugging Face folders OUT_DIR/discriminator and, if possible, OUT_DIR/generator; return them by name.

    The generator's folder is not written if the state has no generator, or if Hugging Face has no class for it. There
    is none for the two causal generators of the objective `electric`, nor for a generator of the architecture `modern`
    whose layers have another width than its token table.

    `vocab_file` is the corpus's vocab.txt, whose content may be a tokenizer.json. `lowercase` says whether the
    tokenizer lower-cases. Files of the same names in `out_dir` are replaced.
    """
    folders = tower_folders(state, model, out_dir)
    export_discriminator(state, model, special, vocab_file, lowercase, folders["discriminator"])
    if "generator" in folders:
        export_generator(state, model, special, vocab_file, lowercase, folders["generator"])
    return folders


def tower_folders(state: State, model: ModelConfig, out_dir: Path) -> dict[str, Path]:
    """Return the folders that `export_towers` writes for these weights, by name ("discriminator", "generator")."""
    folders = {"discriminator": out_dir / "discriminator"}
    # "towers.generator_head.bias" is in the module "generator_head".
    modules = {name.removeprefix("towers.").partition(".")[0] for name in state}
    has_generator = "generator_head" in modules
    is_causal_pair = "generator_reverse" in modules
    has_class = model.architecture == "bert" or not hf_modernbert.find_obstacle(model)
    if has_generator and has_class and not is_causal_pair:
        folders["generator"] = out_dir / "generator"
    return folders


def export_discriminator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the discriminator with its tokenizer as a Hugging Face folder; arguments as for `export_towers`.

    The model class is ElectraForPreTraining or, if the discriminator was trained to predict tokens,
    ElectraForMaskedLM. With `model.architecture: modern` it is ModernBertForTokenClassification or
    ModernBertForMaskedLM.
    """
    tensors = to_hf_discriminator(state, model)
    if model.architecture == "modern":
        predicts_tokens = hf_modernbert.OUTPUT_BIAS in tensors
        architecture = "ModernBertForMaskedLM" if predicts_tokens else "ModernBertForTokenClassification"
        config = hf_modernbert.hf_config(model, "discriminator", special, architecture)
        if not predicts_tokens:
            config |= hf_modernbert.DETECTION_LABELS
    else:
        predicts_tokens = OUTPUT_BIAS in tensors
        architecture = "ElectraForMaskedLM" if predicts_tokens else "ElectraForPreTraining"
        config = _hf_config(model, "discriminator", special, architecture)
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def export_generator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the generator with its tokenizer as a folder for ElectraForMaskedLM or ModernBertForMaskedLM."""
    tensors = to_hf_generator(state, model)
    if model.architecture == "modern":
        config = hf_modernbert.hf_config(model, "generator", special, "ModernBertForMaskedLM")
    else:
        config = _hf_config(model, "generator", special, "ElectraForMaskedLM")
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


class TaskHead(NamedTuple):
    """Head that a task such as classification adds to an encoder, in the form that a Hugging Face class loads."""

    architecture: str  # Hugging Face's model class, such as "ElectraForSequenceClassification"
    weights: dict[str, torch.Tensor]  # parameter name -> fp32 value on the host
    config: dict[str, Any]  # entries that config.json has besides those of the encoder, such as "id2label"


def export_task_model(
    encoder: State,
    head: TaskHead,
    model: ModelConfig,
    special: SpecialIds,
    vocabulary_text: str,
    lowercase: bool,
    out_dir: Path,
) -> None:
    """Write an encoder with the head of a task (such as classification), and its tokenizer, as a Hugging Face folder.

    The names of the `encoder`'s weights begin with `embeddings.` and, for its layers, with `discriminator.`; its shape
    is that of `model.discriminator`. Files of the same names in `out_dir` are replaced.
    """
    tensors = to_hf_discriminator(encoder, model) | head.weights
    make_config = hf_modernbert.hf_config if model.architecture == "modern" else _hf_config
    config = make_config(model, "discriminator", special, head.architecture) | head.config
    with tempfile.TemporaryDirectory() as folder:
        vocab_file = Path(folder) / VOCAB_FILE
        vocab_file.write_text(vocabulary_text, "utf-8")
        _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def _hf_config(model: ModelConfig, tower: TowerName, special: SpecialIds, architecture: str) -> dict[str, Any]:
    """Return the content of ELECTRA's config.json for one tower; `architecture` is Hugging Face's model class."""
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
    """Write model.safetensors, config.json and the tokenizer's files; vocab.txt is written for WordPiece only."""
    vocabulary = Vocabulary.read(vocab_file)
    _write_json(out_dir / "config.json", config)
    if vocabulary.tokenizer_json is None:
        _write_file(out_dir / "vocab.txt", read_regular(vocab_file))
        tokenizer_text = BertWordPieceTokenizer(vocabulary.ids, lowercase=lowercase).to_str(pretty=False)
    else:
        tokenizer_text = vocabulary.tokenizer_json.for_hugging_face()
    _write_file(out_dir / "tokenizer.json", tokenizer_text.encode())
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
    }
    if vocabulary.tokenizer_json is None:
        tokenizer_config |= {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase}
    if config["model_type"] == hf_modernbert.MODEL_TYPE:
        # ModernBERT has no token types, and its models refuse them as inputs.
        tokenizer_config |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
    for role in _SPECIAL_TOKENS:
        token_id = vocabulary.special[f"[{role.upper()}]"]
        tokenizer_config[f"{role}_token"] = vocabulary.tokens[token_id]  # for WordPiece "mask_token": "[MASK]"
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    # Last, so that a folder with weights is complete.
    _write_file(out_dir / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as Hugging Face does: indented by two spaces, keys sorted, a line feed at the end."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    _write_file(path, text.encode())


def _write_file(path: Path, content: bytes) -> None:
    """Write or replace a file atomically; other users may read it unless the process's umask forbids it."""
    with replacing(path) as file:
        file.write(content)
