"""Name keys by their dotted paths, such as "train.micro_batch": those of a config's classes, and those of a tree."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Tree = dict[str, Any]
_ELEMENTS: dict[Any, str] = {tuple: "[]", dict: ".*"}  # how a key names any element of a list or a mapping
# Name in Hugging Face's Trainer or google-research/electra -> our keys for it: of a run, of fine-tuning, or of both.
NAMES_ELSEWHERE = {
    "adam_beta1": ("optimizer.beta1", "beta1"),
    "adam_beta2": ("optimizer.beta2", "beta2"),
    "adam_epsilon": ("optimizer.eps", "eps"),
    "batch": ("train.global_batch", "batch"),
    "batch_size": ("train.global_batch", "batch"),
    "bf16": ("train.precision",),
    "eval_steps": ("log.eval_every_steps",),
    "fp16": ("train.precision",),
    "gradient_accumulation_steps": ("train.global_batch",),
    "gradient_checkpointing": ("engine.activation_checkpointing",),
    "layerwise_lr_decay": ("layer_decay",),
    "learning_rate": ("optimizer.lr", "lr"),
    "logging_steps": ("log.every_steps",),
    "max_grad_norm": ("optimizer.clip_norm", "clip_norm"),
    "max_len": ("data.seq_len", "max_length"),
    "max_length": ("data.seq_len", "max_length"),
    "max_position_embeddings": ("model.max_positions",),
    "max_seq_len": ("data.seq_len", "max_length"),
    "max_seq_length": ("data.seq_len", "max_length"),
    "max_steps": ("train.num_steps",),
    "mlm_probability": ("objective.mask_prob",),
    "num_epochs": ("train.num_steps", "epochs"),
    "num_train_epochs": ("train.num_steps", "epochs"),
    "num_train_steps": ("train.num_steps",),
    "output_dir": ("run_dir",),
    "per_device_train_batch_size": ("train.micro_batch", "batch"),
    "save_steps": ("checkpoint.every_steps",),
    "save_total_limit": ("checkpoint.keep_last",),
    "seq_len": ("data.seq_len", "max_length"),
    "seq_length": ("data.seq_len", "max_length"),
    "steps": ("train.num_steps",),
    "train_batch_size": ("train.global_batch", "batch"),
    "warmup": ("optimizer.warmup_steps", "warmup_fraction"),
    "warmup_ratio": ("optimizer.warmup_steps", "warmup_fraction"),
    "warmup_steps": ("optimizer.warmup_steps", "warmup_fraction"),
}


def fields(root: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return all keys of a config class and of the sections within it, as dotted key -> field.

    A section comes before its keys. In a key, [] stands for the elements of a list of sections, as in
    "data.phases[].corpus", and * for those of a mapping, as in "tasks.*.seeds".
    """
    found: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        key = field.alias or name
        found[key] = field
        section = section_class(field.annotation)
        if section is not None:
            place = key + _ELEMENTS.get(get_origin(field.annotation), "")
            found |= {f"{place}.{inner_key}": inner_field for inner_key, inner_field in fields(section).items()}
    return found


def nearest_key(section: str, name: str, known: Collection[str]) -> str | None:
    """Return the key that was probably meant by the unknown key `name` in `section`; None if no key is near.

    It is the key of `known` that Hugging Face's Trainer or Google's ELECTRA calls by this name, or the only key of
    this name in another section, or one of the same section with a similar name. `section` is "" at the top of the
    config.
    """
    for key in NAMES_ELSEWHERE.get(name, ()):
        if key in known:
            return key
    same_name = [key for key in known if key.endswith(f".{name}") and not set(key) & {"[", "*"}]
    outer = [key for key in same_name if key.count(".") == 1]
    if len(outer) == 1:
        return outer[0]
    names = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{section}.{similar[0]}".removeprefix(".") if similar else None


def section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the config section in a field's type, such as S in `tuple[S, ...]`; None if the type contains none."""
    for part in (annotation, *get_args(annotation)):
        kind = get_args(part)[0] if get_origin(part) is Annotated else part
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def flattened(tree: Tree, prefix: str = "") -> Tree:
    """Flatten nested dictionaries into one with dotted keys; an empty inner dictionary stays a value."""
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
