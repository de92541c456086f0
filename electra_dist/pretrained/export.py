"""Write a checkpoint of a run, or a fine-tuned model, as folders that Hugging Face's classes load.

Guarantee: AutoModel, ElectraForPreTraining, ElectraForMaskedLM, their counterparts for ModernBERT, and AutoTokenizer
load these folders with the same logits, whichever weights generator and discriminator share and whichever objective
trained them. Weights are in fp32.

How: transformers is not imported: config.json, model.safetensors and the tokenizer's files are written directly.
`hf.py` translates the names of the parameters. No process group and no GPU are needed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from electra_kernels.operation_types import SpecialIds
from safetensors.torch import save
from tokenizers import BertWordPieceTokenizer

from electra_dist.checkpoint.chosen_weights import CheckpointProgress, Choice, report_nothing
from electra_dist.checkpoint.manifest import RunState
from electra_dist.config import Config, ModelConfig
from electra_dist.errors import UserError
from electra_dist.escapes import printable
from electra_dist.pretrained.hf import DETECTION_LABELS, MODERNBERT, State, TowerName, family_of, find_obstacle, to_hf
from electra_dist.pretrained.hf_folders import (
    PRETRAINING_FILE,
    TOKENIZER_FILES,
    PretrainingRecord,
    write_pretraining_record,
)
from electra_dist.pretrained.hf_settings import hf_config
from electra_dist.pretrained.weights import RunWeights, load_run_weights
from electra_dist.store.atomic_files import nearest_folder, replacing
from electra_dist.tokenizer import Vocabulary
from electra_dist.version import VERSION

_OTHER_FILES = ("config.json", "model.safetensors", "README.md")  # of an exported model, beside those of the tokenizer
_SPECIAL_TOKENS = ("pad", "unk", "cls", "sep", "mask")


# Folders of an export. "masked_lm" is the discriminator of joint MLM with the head that predicts tokens.
ModelName = Literal["discriminator", "generator", "masked_lm"]


class Export(NamedTuple):
    """Result of an export: the folders written, and the run and the checkpoints that the weights come from."""

    config: Config  # config of the run
    state: RunState  # run state at the exported checkpoint; for a mean, at the newest checkpoint in it
    steps: tuple[int, ...]  # steps of the checkpoints in the mean, ascending; one step if there is no mean
    folders: dict[ModelName, Path]  # "discriminator" and, if they were exported, "generator" and "masked_lm"


def export_run(
    run_dir: Path,
    output: Path,
    choice: Choice = "newest",
    num_averaged: int = 1,
    progress: CheckpointProgress = report_nothing,
) -> Export:
    """Export a checkpoint of a run, or a mean of several, to OUTPUT/discriminator and, if possible, OUTPUT/generator.

    With joint MLM, OUTPUT/masked_lm has the discriminator with the head that predicts tokens. Each folder also gets
    the file pretraining.json, which says how the model was trained. Files of the same names are replaced, but an
    output folder with the model of another program is refused. One line on stderr names each checkpoint that was
    skipped because it is damaged.

    `choice` is the number of steps after which the checkpoint was taken, "newest", or "best" on held-out rows.
    `num_averaged` counts the checkpoints in the mean, the chosen one included; 1 for no mean. `progress` is called
    with (checkpoints read, checkpoints to read), first before any is read, then after each one.
    """
    _check_writable(output)  # before the weights are read, which may take minutes
    for name in get_args(ModelName):
        _refuse_model_of_others(output / name)
    run = load_run_weights(run_dir, choice, num_averaged, progress)
    for line in run.damaged:
        print(printable(line), file=sys.stderr)
    if run.damaged and num_averaged == 1:
        print(printable(f"exporting the checkpoint of step {run.state.step:,} instead"), file=sys.stderr)
    vocabulary = run.vocabulary  # verified before anything is written
    lowercase = run.tokenizer.lowercase
    folder_of_name = tower_folders(run.weights, run.config.model, output)
    records = {folder: _record_of(run, _tower_in(name)) for name, folder in folder_of_name.items()}
    # The records are there first, so that the next export may replace the files of one that was killed.
    for folder, record in records.items():
        write_pretraining_record(folder, record)
    folders = export_towers(run.weights, run.config.model, vocabulary, lowercase, output)
    has_generator = any(".generator_head." in f".{name}" for name in run.weights)
    obstacle = find_obstacle(run.config.model)
    if obstacle and has_generator:
        print(printable(f"no generator is exported: {obstacle}"), file=sys.stderr)
    for folder, record in records.items():
        write_pretraining_record(folder, record)  # again, with the digests of the tokenizer's files
    return Export(config=run.config, state=run.state, steps=run.steps, folders=folders)


def _record_of(run: RunWeights, tower: TowerName) -> PretrainingRecord:
    return PretrainingRecord(
        objective=run.config.objective.name,
        tower=tower,
        seq_len=run.config.data.seq_len,
        steps=run.steps,
        rows=run.state.rows_seen,
        corpus_fingerprint=run.state.corpus_fingerprint,
        electra_dist=VERSION,
    )


def _refuse_model_of_others(folder: Path) -> None:
    """Raise UserError if a folder holds a model that no export wrote, so that its files are not replaced."""
    if (folder / PRETRAINING_FILE).exists():
        return
    for name in (*TOKENIZER_FILES, *_OTHER_FILES):
        if (folder / name).exists():
            raise UserError(
                f"{folder / name}: is not of an export, because {PRETRAINING_FILE} is missing beside it; choose "
                "another folder with --output, or move this one away"
            )


def _check_writable(output: Path) -> None:
    """Raise UserError if the folder, or its nearest parent that exists, cannot be written; nothing is created."""
    nearest = nearest_folder(output)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{output}: {nearest} is not a writable folder; choose another folder with --output")


def export_towers(
    state: State, model: ModelConfig, vocabulary: Vocabulary, lowercase: bool, out_dir: Path
) -> dict[ModelName, Path]:
    """Write both towers of a model as Hugging Face folders OUT_DIR/discriminator and OUT_DIR/generator.

    A discriminator with two heads, one of which predicts tokens, gets a folder for each: the second is
    OUT_DIR/masked_lm. The generator's folder is not written if the state has no generator, or if Hugging Face has no
    class for it. There is none for the two causal generators of the objective `electric`, nor for a generator of the
    architecture `modern` whose layers have another width than its token table.

    `vocabulary` is that of the corpus; `lowercase` says whether its tokenizer lower-cases. Files of the same names in
    `out_dir` are replaced. Returns the folders that were written, by name.
    """
    folders = tower_folders(state, model, out_dir)
    for name, folder in folders.items():
        weights = state
        if name == "masked_lm":  # without the other head, the discriminator is one that predicts tokens
            weights = {key: value for key, value in state.items() if _module(key) != "discriminator_head"}
        export_tower(weights, model, _tower_in(name), vocabulary, lowercase, folder)
    return folders


def _tower_in(name: ModelName) -> TowerName:
    return "generator" if name == "generator" else "discriminator"


def _module(parameter: str) -> str:
    """Return the module of a parameter: "towers.generator_head.bias" is in "generator_head"."""
    return parameter.removeprefix("towers.").partition(".")[0]


def tower_folders(state: State, model: ModelConfig, out_dir: Path) -> dict[ModelName, Path]:
    """Return name -> folder of the models that `export_towers` writes for these weights."""
    folders: dict[ModelName, Path] = {"discriminator": out_dir / "discriminator"}
    modules = {_module(name) for name in state}
    has_generator = "generator_head" in modules
    is_causal_pair = "generator_reverse" in modules
    if has_generator and not is_causal_pair and not find_obstacle(model):
        folders["generator"] = out_dir / "generator"
    if {"discriminator_head", "token_head"} <= modules:
        folders["masked_lm"] = out_dir / "masked_lm"
    return folders


def export_tower(
    state: State, model: ModelConfig, tower: TowerName, vocabulary: Vocabulary, lowercase: bool, out_dir: Path
) -> None:
    """Write one tower with its head and its tokenizer as a Hugging Face folder; arguments as for `export_towers`.

    The model class is ElectraForMaskedLM for a generator, and for a discriminator that was trained to predict tokens;
    otherwise ElectraForPreTraining. With `model.architecture: modern` it is ModernBertForMaskedLM or
    ModernBertForTokenClassification.
    """
    hf = family_of(model)
    tensors = to_hf(state, model, tower)
    predicts_tokens = tower == "generator" or hf.token_mark in tensors
    special = SpecialIds.from_tokens(vocabulary.special)
    config = hf_config(model, tower, special, hf.token_class if predicts_tokens else hf.detection_class)
    if hf is MODERNBERT and not predicts_tokens:
        config |= DETECTION_LABELS
    write_model_folder(tensors, config, vocabulary, lowercase, model.max_positions, out_dir)


def write_model_folder(
    weights: State,
    config: dict[str, Any],
    vocabulary: Vocabulary,
    lowercase: bool,
    max_length: int,
    out_dir: Path,
) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, in which files of the same names are replaced.

    `weights`, in fp32 on the host, and `config`, the content of config.json, are those of a class of transformers.
    A tokenizer that is asked to cut texts cuts them to `max_length` tokens, with the special ones. The file vocab.txt
    is written for a WordPiece tokenizer only.
    """
    _write_json(out_dir / "config.json", config)
    if vocabulary.tokenizer_json is None:
        _write_file(out_dir / "vocab.txt", vocabulary.text.encode())
        tokenizer_text = BertWordPieceTokenizer(vocabulary.ids, lowercase=lowercase).to_str(pretty=False)
    else:
        tokenizer_text = vocabulary.tokenizer_json.for_hugging_face()
    _write_file(out_dir / "tokenizer.json", tokenizer_text.encode())
    has_token_types = config["model_type"] != MODERNBERT.model_type
    _write_json(
        out_dir / "tokenizer_config.json", _tokenizer_config(vocabulary, lowercase, max_length, has_token_types)
    )
    # Last, so that a folder with weights is complete.
    _write_file(out_dir / "model.safetensors", save(dict(weights), metadata={"format": "pt"}))


def _tokenizer_config(
    vocabulary: Vocabulary, lowercase: bool, max_length: int, has_token_types: bool
) -> dict[str, Any]:
    is_word_piece = vocabulary.tokenizer_json is None
    config: dict[str, Any] = {
        "tokenizer_class": "BertTokenizer" if is_word_piece and has_token_types else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
    }
    if is_word_piece:
        config["do_lower_case"] = lowercase
    if not has_token_types:  # the models of ModernBERT, which has none, refuse them as inputs
        config["model_input_names"] = ["input_ids", "attention_mask"]
    for role in _SPECIAL_TOKENS:
        token_id = vocabulary.special[f"[{role.upper()}]"]
        config[f"{role}_token"] = vocabulary.tokens[token_id]  # for WordPiece "mask_token": "[MASK]"
    return config


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as Hugging Face does: indented by two spaces, keys sorted, a line feed at the end."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    _write_file(path, text.encode())


def _write_file(path: Path, content: bytes) -> None:
    """Write or replace a file atomically; other users may read it unless the process's umask forbids it."""
    with replacing(path) as file:
        file.write(content)
