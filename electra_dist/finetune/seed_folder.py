"""Write the folder of a fine-tuned seed: the model in Hugging Face's format, predictions, and a record of the result.

Guarantee: a folder with the name seed-N or best is complete. It is written under another name and renamed at the end.
Its file finetune.json has the identity of the result, a digest of model, data and settings, so a folder with another
identity is recognised and never replaced. Its bytes depend on identity, seed and the pretrained model's name only.

Cost: one copy of the weights in fp32 for each seed; the best seed's folder shares the bytes of its weights with the
seed's own folder where the file system has hard links.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from electra_dist.errors import StoreError, UserError
from electra_dist.finetune.finetune_config import WITHOUT_EFFECT, FinetuneConfig
from electra_dist.finetune.models import TaskModel
from electra_dist.finetune.stored_scores import Measured
from electra_dist.finetune.task import TextFile
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import write_model_folder
from electra_dist.pretrained.hf import State
from electra_dist.store.atomic_files import read_regular, writable
from electra_dist.store.json_file import DamagedJson, parse_json_object

BEST_DIR = "best"  # folder of the seed with the best score
RECORD_FILE = "finetune.json"  # result, settings and identity, in the folder of a seed
_WEIGHTS_FILE = "model.safetensors"


def seed_dir(seed: int) -> str:
    """Return the name of the folder for a fine-tuning seed, such as "seed-0"."""
    return f"seed-{seed}"


def write_seed_folder(
    folder: Path,
    encoder: Pretrained,
    model: TaskModel,
    settings: FinetuneConfig,
    result: Measured,
    predictions: Sequence[TextFile],
    data: dict[str, Any] | None = None,
) -> None:
    """Write a trained model with its tokenizer, its predictions and the record of its result to `folder`.

    In an existing folder, files of the same names are replaced, and others stay. A model with a head of
    the paper is not written. The names of `predictions` are relative to the folder; `data` is `Task.data`.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    record = {
        "model": encoder.name,
        "result": result.numbers(),
        "settings": settings.model_dump(mode="json"),
        "data": data or {},
        "files": [file.name for file in predictions],
    }
    with writable(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        config = model.hf_config()
        if config is not None:
            _write_model(temporary, encoder, config, model.hf_weights(), settings.max_length)
        for file in predictions:
            path = temporary / file.name
            path.parent.mkdir(exist_ok=True)
            path.write_text(file.text, "utf-8")
        (temporary / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        _replace(folder, temporary)


def _write_model(folder: Path, encoder: Pretrained, config: dict[str, Any], weights: State, max_length: int) -> None:
    """Write a model for transformers with the encoder's tokenizer; raise StoreError if the disk takes no weights."""
    try:
        write_model_folder(
            weights=weights,
            config=config,
            vocabulary=encoder.vocabulary,
            lowercase=encoder.tokenizer.lowercase,
            max_length=max_length,
            out_dir=folder,
        )
    except SafetensorError as error:
        raise StoreError(
            f"{folder}: the weights cannot be written ({error}); free space there, or pass another --output"
        ) from None


def read_identity(folder: Path) -> str | None:
    """Return the identity (digest of model, data and settings) of the result in a folder; None if there is no folder.

    Raises UserError if the folder exists, but was not written by fine-tuning.
    """
    record = _read_record(folder)
    return None if record is None else record["result"]["identity"]


def _read_record(folder: Path) -> dict[str, Any] | None:
    if not folder.exists():
        return None
    try:
        record = parse_json_object(read_regular(folder / RECORD_FILE))
        record["result"]["identity"]
    except (OSError, DamagedJson, KeyError, TypeError):
        raise UserError(
            f"{folder}: exists, but is no folder of a fine-tuned model ({RECORD_FILE} is missing or damaged); pass "
            f"another --output, or remove it"
        ) from None
    return record


def check_folder(folder: Path, identity: str, task: str, model: str, settings: FinetuneConfig) -> None:
    """Raise UserError if `folder` has models whose task, encoder, data or settings are not those of this command.

    This keeps the results of different commands apart. `folder`, which may be missing, contains the folders seed-0,
    seed-1, ... and best. `identity` is the digest of the results that will be written. The message names what differs
    from `task`, `model` (the encoder's name) and `settings`, and otherwise says that it is the data or the weights.
    """
    for path in (folder / BEST_DIR, *sorted(folder.glob("seed-*"))):
        record = _read_record(path)
        if record is None or record["result"]["identity"] == identity:
            continue
        stored, current = record.get("settings", {}), settings.model_dump(mode="json")
        changed = [
            key for key in current if key in stored and stored[key] != current[key] and key not in WITHOUT_EFFECT
        ]
        others = [("task", record["result"].get("task"), task), ("encoder", record.get("model"), model)]
        others = [(name, there, here) for name, there, here in others if there != here]
        different_settings = [(key, _as_option(stored[key]), _as_option(current[key])) for key in changed]
        what = ", ".join(f"{name}: {there} there, {here} here" for name, there, here in [*others, *different_settings])
        options = " ".join(f"--set {shlex.quote(f'{key}={there}')}" for key, there, _ in different_settings)
        repeat = f"repeat the command with {options}, " if options and not others else ""
        raise UserError(
            f"{path}: holds a model of another task, encoder, data or settings than this command for {task} "
            f"({what or 'the data, or the weights of the encoder'}); {repeat}pass another --output, add --no-save for "
            f"scores only, or remove {folder}"
        )


def _as_option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def copy_best(folder: Path, results: Sequence[Measured]) -> Path | None:
    """Copy the folder of the best-scoring seed to FOLDER/best, and return that path; None if no seed has a score.

    Of equally good seeds, the one with the lowest number is taken; its folder must exist. FOLDER/best is replaced only
    when the copy is complete, and keeps the files that the copy does not have.
    """
    scored = [(result.score, -result.seed) for result in results if result.score is not None]
    if not scored:
        return None
    _, negative_seed = max(scored)
    source = folder / seed_dir(-negative_seed)
    best = folder / BEST_DIR
    temporary = folder / f".{BEST_DIR}.tmp"
    with writable(best):
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, copy_function=_link_weights)
        _replace(best, temporary)
    return best


def _link_weights(source: str, target: str) -> str:
    """Copy `source` to `target` and return `target`; a file of weights is hard-linked instead if possible."""
    if Path(source).name == _WEIGHTS_FILE:
        try:
            os.link(source, target)
        except OSError:
            return shutil.copyfile(source, target)  # another file system, or one without hard links
        return target
    return shutil.copyfile(source, target)


def _replace(folder: Path, temporary: Path) -> None:
    """Rename the complete folder `temporary` to `folder`; files of an existing `folder` that it lacks are kept."""
    previous = folder.with_name(f".{folder.name}.previous")
    if previous.exists():  # left by a command that was killed in here
        _move_other_files(previous, folder)
    if folder.exists():
        os.replace(folder, previous)
    os.replace(temporary, folder)
    if previous.exists():
        _move_other_files(previous, folder)


def _move_other_files(previous: Path, folder: Path) -> None:
    """Move the files of `previous` that `folder` lacks, such as the user's notes, to `folder`; delete `previous`."""
    for path in sorted(previous.rglob("*")):
        moved = folder / path.relative_to(previous)
        if not path.is_dir() and not moved.exists():
            moved.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, moved)
    shutil.rmtree(previous)
