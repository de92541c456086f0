"""Export a checkpoint of a run, or a mean of several, to Hugging Face folders, without a process group or a GPU."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from electra_dist.checkpoint.chosen_weights import CheckpointProgress, Choice, report_nothing
from electra_dist.checkpoint.manifest import RunState
from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.escapes import printable
from electra_dist.model.row_layout import SpecialIds
from electra_dist.pretrained.hf import find_obstacle
from electra_dist.pretrained.hf_export import export_towers, tower_folders
from electra_dist.pretrained.pretraining_record import (
    PRETRAINING_FILE,
    TOKENIZER_FILES,
    PretrainingRecord,
    write_pretraining_record,
)
from electra_dist.pretrained.run_weights import load_chosen_weights
from electra_dist.tokenizer import VOCAB_FILE
from electra_dist.version import VERSION

_OTHER_FILES = ("config.json", "model.safetensors", "README.md")  # of an exported model, beside those of the tokenizer


class Export(NamedTuple):
    """Result of an export: the folders written, and the run and the checkpoints that the weights come from."""

    config: Config  # config of the run
    state: RunState  # run state at the exported checkpoint; for a mean, at the newest checkpoint in it
    steps: tuple[int, ...]  # steps of the checkpoints in the mean, ascending; one step if there is no mean
    folders: dict[str, Path]  # "discriminator" and, if it was exported, "generator" -> folder


def export_run(
    run_dir: Path,
    output: Path,
    choice: Choice = "newest",
    num_averaged: int = 1,
    progress: CheckpointProgress = report_nothing,
) -> Export:
    """Export a checkpoint of a run, or a mean of several, to OUTPUT/discriminator and, if possible, OUTPUT/generator.

    Each folder also gets the file pretraining.json, which says how the model was trained. Files of the same names are
    replaced, but an output folder with the model of another program is refused. One line on stderr names each
    checkpoint that was skipped because it is damaged.

    `choice` is the number of steps after which the checkpoint was taken, "newest", or "best" on held-out rows.
    `num_averaged` counts the checkpoints in the mean, the chosen one included; 1 for no mean. `progress` is called
    with (checkpoints read, checkpoints to read), first before any is read, then after each one.
    """
    _check_writable(output)  # before the weights are read, which may take minutes
    for tower in ("discriminator", "generator"):
        _refuse_model_of_others(output / tower)
    run = load_chosen_weights(run_dir, choice, num_averaged, progress)
    for line in run.damaged:
        print(printable(line), file=sys.stderr)
    tokenizer = run.tokenizer
    vocabulary = run.vocabulary
    records = {
        folder: PretrainingRecord(
            objective=run.config.objective.name,
            tower="generator" if tower == "generator" else "discriminator",
            seq_len=run.config.data.seq_len,
            steps=run.steps,
            rows=run.state.rows_seen,
            corpus_fingerprint=run.state.corpus_fingerprint,
            electra_dist=VERSION,
        )
        for tower, folder in tower_folders(run.weights, run.config.model, output).items()
    }
    # The records are there first, so that the next export may replace the files of one that was killed.
    for folder, record in records.items():
        write_pretraining_record(folder, record)
    with tempfile.TemporaryDirectory() as temporary:
        vocab_file = Path(temporary) / VOCAB_FILE
        vocab_file.write_text(vocabulary.text, "utf-8")
        folders = export_towers(
            state=run.weights,
            model=run.config.model,
            special=SpecialIds.from_tokens(tokenizer.special),
            vocab_file=vocab_file,
            lowercase=tokenizer.lowercase,
            out_dir=output,
        )
    has_generator = any(".generator_head." in f".{name}" for name in run.weights)
    obstacle = find_obstacle(run.config.model)
    if obstacle and has_generator:
        print(printable(f"no generator is exported: {obstacle}"), file=sys.stderr)
    for folder, record in records.items():
        write_pretraining_record(folder, record)  # again, with the digests of the tokenizer's files
    return Export(config=run.config, state=run.state, steps=run.steps, folders=folders)


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
    nearest = output
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{output}: {nearest} is not a writable folder; choose another folder with --output")
