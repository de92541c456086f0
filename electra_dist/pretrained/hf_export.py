"""Write the towers of a run, or a fine-tuned model, as folders that Hugging Face's classes load.

Guarantee: AutoModel, ElectraForPreTraining, ElectraForMaskedLM, their counterparts for ModernBERT, and AutoTokenizer
load these folders with the same logits, whichever weights generator and discriminator share and whichever objective
trained them. Weights are in fp32.

How: transformers is not imported: config.json, model.safetensors and the tokenizer's files are written directly.
`hf.py` translates the names of the parameters.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import BertWordPieceTokenizer

from electra_dist.config import ModelConfig
from electra_dist.model.row_layout import SpecialIds
from electra_dist.pretrained.hf import (
    DETECTION_LABELS,
    MODERNBERT,
    State,
    family_of,
    find_obstacle,
    hf_config,
    to_hf,
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
    if has_generator and not is_causal_pair and not find_obstacle(model):
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
    hf = family_of(model)
    tensors = to_hf(state, model, "discriminator")
    predicts_tokens = hf.token_mark in tensors
    config = hf_config(model, "discriminator", special, hf.token_class if predicts_tokens else hf.detection_class)
    if hf is MODERNBERT and not predicts_tokens:
        config |= DETECTION_LABELS
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def export_generator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the generator with its tokenizer as a folder for ElectraForMaskedLM or ModernBertForMaskedLM."""
    tensors = to_hf(state, model, "generator")
    config = hf_config(model, "generator", special, family_of(model).token_class)
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def export_task_model(
    weights: State, config: dict[str, Any], vocabulary_text: str, lowercase: bool, max_positions: int, out_dir: Path
) -> None:
    """Write a model for a task (such as classification) and its tokenizer as a Hugging Face folder.

    `weights`, in fp32 on the host, and `config` are those of a class of transformers. Files of the same names in
    `out_dir` are replaced.
    """
    with tempfile.TemporaryDirectory() as folder:
        vocab_file = Path(folder) / VOCAB_FILE
        vocab_file.write_text(vocabulary_text, "utf-8")
        _write(dict(weights), config, vocab_file, lowercase, max_positions, out_dir)


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
    if config["model_type"] == MODERNBERT.model_type:
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
