"""Read a YAML file and command-line overrides into a `Config`, and write a `Config` as YAML.

Guarantee: every mistake in a config is a UserError of one line, which names the file (or --set), the key, the nearest
valid key and the next step. The process then ends with exit code 78.

How: layers are merged, a later one above an earlier one: the file that `extends: base.yaml` names (a path relative to
the extending file), the config file itself, and `--set train.micro_batch=32` for each override. `sources` returns the
layer that each value comes from.

Limits: a base file may not extend another file, so at most two files describe a run.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from electra_dist.config import Config, Section
from electra_dist.errors import UserError

Tree = dict[str, Any]
S = TypeVar("S", bound=Section)

_COLLECTIONS: tuple[Any, ...] = (dict, tuple)
_OVERRIDE = "--set"  # Name of a layer that comes from the command line instead of a file.


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate the config file `path`, with overrides from the command line.

    Args:
        path: YAML file; it may extend one other file.
        overrides: Texts of the form key.path=value, where the value is YAML. A later one replaces an earlier one.

    Raises:
        UserError: The file is missing, is not YAML, or holds an unknown key or an invalid value. The message is one
            line with the file (or --set), the key and the next step.
    """
    layers = _layers(Path(path), overrides)
    merged: Tree = {}
    for _, layer in layers:
        merged = _merge(merged, layer)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise UserError(_explain(error, layers)) from None


def load_section(path: Path, kind: type[S]) -> S:
    """Read and validate a YAML file that holds one section, such as the file of `electra-dist compare`.

    Args:
        path: YAML file; `extends` is not supported.
        kind: Class of the section.

    Raises:
        UserError: As in `load_config`.
    """
    tree = _read_yaml(path)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(_explain(error, [(str(path), tree)], kind)) from None


def sources(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return where each value of the resolved config comes from.

    Returns:
        For each dotted key such as train.micro_batch: the name of a file, `--set` or `default`.

    Raises:
        UserError: As in `load_config`.
    """
    layers = _layers(Path(path), overrides)
    source_of_key = dict.fromkeys(_leaves(load_config(path, overrides).model_dump(mode="json")), "default")
    for name, layer in layers:
        source_of_key.update(dict.fromkeys(_leaves(layer), name))
    return source_of_key


def dump_yaml(config: Config) -> str:
    """Return the resolved config as YAML text, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _layers(path: Path, overrides: Sequence[str]) -> list[tuple[str, Tree]]:
    """Return (name, tree) of the base file, the file itself and each override; a later layer replaces values."""
    tree = _read_yaml(path)
    layers = []
    base_name = tree.pop("extends", None)
    if base_name is not None:
        base_path = path.parent / str(base_name)
        base = _read_yaml(base_path)
        if "extends" in base:
            raise UserError(
                f"{base_path}: extends: only one level is allowed; copy the keys of {base['extends']} into this file "
                f"and remove its extends"
            )
        layers.append((str(base_path), base))
    layers.append((str(path), tree))
    layers.extend((_OVERRIDE, _parse_override(text)) for text in overrides)
    return layers


def _read_yaml(path: Path) -> Tree:
    """Return the mapping in a YAML file.

    Raises:
        UserError: The file is missing, unreadable, not YAML or not a mapping.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such config file; check the path (the files that come with the project are in configs/)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a readable YAML file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_and_column = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", error)
        raise UserError(f"{path}{line_and_column}: not valid YAML ({problem}); correct this place") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: expected sections such as `train:`, found {type(tree).__name__}; write the keys of a config "
            f"(configs/ has examples)"
        )
    return tree


def _parse_override(text: str) -> Tree:
    """Return the tree of one override: {"train": {"micro_batch": 32}} for "train.micro_batch=32".

    Raises:
        UserError: There is no key or no equals sign, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: expected key.path=value; write for example --set train.micro_batch=32")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML; put the value in quotes") from None
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return tree


def _merge(below: Tree, above: Tree) -> Tree:
    """Return `below` with the values of `above`; sections that both hold are merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _leaves(tree: Tree, prefix: str = "") -> list[str]:
    """Return the dotted keys of all values of a tree that are not mappings themselves."""
    keys: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            keys += _leaves(value, f"{prefix}{key}.")
        else:
            keys.append(f"{prefix}{key}")
    return keys


def _explain(error: ValidationError, layers: list[tuple[str, Tree]], root: type[BaseModel] = Config) -> str:
    """Return one line about the first fault of a failed validation, with the number of further faults at its end."""
    # Unknown keys come first: a misspelt key also makes the right one missing.
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    first = faults[0]
    location = _key_path(first)
    # A key that allows several types has one fault for each of them.
    faults_of_key = [fault for fault in faults if _key_path(fault) == location]
    if first["type"] == "extra_forbidden":
        message = f"unknown key `{'.'.join(location)}`{_suggestion(root, location)}"
    elif first["type"] == "missing":
        message = _explain_missing(root, location)
    else:
        message = _explain_invalid(root, location, faults_of_key)
    num_more = len(faults) - len(faults_of_key)
    more = f" [and {num_more} more]" if num_more else ""
    return f"{_layer_of(layers, location)}: {message}{more}"


def _explain_missing(root: type[BaseModel], location: list[str]) -> str:
    """Return the message for a required key that no layer holds."""
    advice = "add it or extend base.yaml" if root is Config else "add it"
    return f"missing key `{'.'.join(location)}`; {advice}{_meaning(root, location)}"


def _explain_invalid(root: type[BaseModel], location: list[str], faults: list[ErrorDetails]) -> str:
    """Return the message for a key, or a section, whose value is invalid.

    Args:
        root: Class of the whole file.
        location: Path of the key; empty when the values of several sections contradict each other.
        faults: All faults of the key.
    """
    first = faults[0]
    key = f"`{'.'.join(location)}`: " if location else ""
    reasons = [fault["msg"].removeprefix("Value error, ") for fault in faults]
    reason = " or ".join(text[0].lower() + text[1:] for text in reasons)
    is_section = isinstance(first["input"], (dict, BaseModel))
    if is_section and first["type"] == "value_error":
        return f"{key}{reason}"  # A check of a whole section; its message names the values and the next step.
    value = "" if is_section else f", not {first['input']!r}"
    return f"{key}{reason}{value}; correct the value{_meaning(root, location)}"


def _key_path(fault: ErrorDetails) -> list[str]:
    """Return the path of the key at fault, without pydantic's names of the types that the key may have."""
    parts = [str(part) for part in fault["loc"]]
    return [part for part in parts if not part.startswith(("constrained-", "literal["))]


def _layer_of(layers: list[tuple[str, Tree]], location: Sequence[str]) -> str:
    """Return the name of the topmost layer that holds the key, or of the topmost layer if none does."""
    for name, layer in reversed(layers):
        if _contains(layer, location):
            return name
    return layers[-1][0]


def _contains(layer: Any, location: Sequence[str]) -> bool:
    """Return whether a tree holds the key at `location`."""
    for part in location:
        if not isinstance(layer, dict) or part not in layer:
            return False
        layer = layer[part]
    return True


def _suggestion(root: type[BaseModel], location: Sequence[str]) -> str:
    """Return the next step after an unknown key: the nearest valid key, or the list of the section's keys."""
    *path, unknown = location
    section = _section(root, path)
    valid = list(section.model_fields) if section else []
    nearest = difflib.get_close_matches(unknown, valid, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean `{'.'.join([*path, nearest[0]])}`?"
    return f"; remove it or use one of {', '.join(valid)}" if valid else "; remove it"


def _section(root: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    """Return the class of the config section at a path, or None if the path does not lead to a section.

    For the root Config and the path ["train"] it is TrainConfig. Where a field is a tuple or a mapping of sections,
    the next part of the path is an index or a name; it selects an element and is skipped.

    Args:
        root: Class of the whole config.
        location: Names of fields from the root to the section; empty for the root itself.
    """
    section = root
    part_selects_element = False
    for part in location:
        if part_selects_element:
            part_selects_element = False
            continue
        field = section.model_fields.get(part)
        if field is None:
            return None
        part_selects_element = get_origin(field.annotation) in _COLLECTIONS
        types = [field.annotation, *get_args(field.annotation)]
        inner_sections = [kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner_sections:
            return None
        section = inner_sections[0]
    return section


def _meaning(root: type[BaseModel], location: Sequence[str]) -> str:
    """Return the description of the key at `location` as the end of a message, or "" if there is none."""
    if not location:
        return ""
    *path, key = location
    section = _section(root, path)
    field = section.model_fields.get(key) if section else None
    if field is None or not field.description:
        return ""
    return f". {key}: {field.description}"
