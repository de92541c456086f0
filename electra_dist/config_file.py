"""Read a YAML file and command-line overrides into a `Config`, and write a `Config` as YAML.

Guarantee: every mistake in a config is a UserError of one line, which names the file (or --set), the key, the nearest
valid key and the next step. The process then ends with exit code 78.

How: `config_layers.py` reads the layers of a config, of which a later one replaces values of an earlier one: the files
that the config file extends, the config file itself, and each override such as `--set train.micro_batch=32`. They are
merged and validated as one tree. `sources` returns the layer that each value comes from.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from electra_dist.config import Config, Section
from electra_dist.config_layers import Tree, find_config_file, merge, read_layers, read_yaml
from electra_dist.config_sections.secrets import without_secrets
from electra_dist.errors import UserError
from electra_dist.schedule import NUMBER_TAG, SCHEDULE_TAG

S = TypeVar("S", bound=Section)

_COLLECTIONS: tuple[Any, ...] = (dict, tuple)
_UNKNOWN_KEY = "extra_forbidden"  # pydantic's types of faults
_MISSING_KEY = "missing"
_RAISED_BY_CHECK = "value_error"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate the config file `path`. An override is a text such as "train.micro_batch=32", its value YAML.
    A path configs/NAME that does not exist is taken from the files that come with the package. A later override
    replaces an earlier one. Raises UserError with one line that names the file (or --set), the key and the next step.
    """
    layers = read_layers(Path(path), overrides)
    merged: Tree = {}
    for _, tree in layers:
        merged = merge(merged, tree)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise UserError(_explain(error, layers)) from None


def load_section(path: Path, kind: type[S]) -> S:
    """Read a section of class `kind` from a YAML file that has only the keys of this section, without `extends`."""
    path = find_config_file(path)
    tree = read_yaml(path)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        layers = [(str(path), tree)]
        raise UserError(_explain(error, layers, root=kind)) from None


def sources(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return where each value of the resolved config comes from: dotted key -> file name, `--set` or `default`."""
    resolved = load_config(path, overrides).model_dump(mode="json")
    source_of_key = dict.fromkeys(_leaves(resolved), "default")
    for name, tree in read_layers(Path(path), overrides):
        for key in _leaves(tree):
            # A later layer replaces the values of earlier ones; a number may have replaced a schedule, whose keys are
            # then not in the resolved config.
            if key in source_of_key:
                source_of_key[key] = name
    return source_of_key


def key_description(key: str) -> str:
    """Return the description of a config key such as `train.micro_batch`; "" if there is no such key.
    A key within a schedule, such as `objective.temperature.tau`, has the same description in all schedules.
    """
    return _description(Config, key.split("."))


def dump_yaml(config: Config) -> str:
    """Return the resolved config as YAML text, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _leaves(tree: Tree, prefix: str = "") -> list[str]:
    """Return the dotted key, such as "train.micro_batch", of every value in a tree that is not itself a mapping."""
    keys: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            keys += _leaves(value, f"{prefix}{key}.")
        else:
            keys.append(f"{prefix}{key}")
    return keys


def _explain(error: ValidationError, layers: list[tuple[str, Tree]], root: type[BaseModel] = Config) -> str:
    """Return one line about the first mistake that validation found, and the number of other mistakes."""
    faults = error.errors()
    # Unknown keys come first: a misspelt key also makes the right one missing.
    unknown = [fault for fault in faults if fault["type"] == _UNKNOWN_KEY]
    first = unknown[0] if unknown else faults[0]
    location = _key_path(first)
    # A key that allows several types has one fault for each of them.
    faults_of_key = [fault for fault in faults if _key_path(fault) == location]
    if first["type"] == _UNKNOWN_KEY:
        message = _explain_unknown(root, location)
    elif first["type"] == _MISSING_KEY:
        message = _explain_missing(root, location)
    else:
        message = _explain_invalid(root, location, faults_of_key)
    line = f"{_layer_of(layers, location)}: {message}"
    num_more = len(faults) - len(faults_of_key)
    return f"{line} [and {num_more} more]" if num_more else line


def _explain_unknown(root: type[BaseModel], location: list[str]) -> str:
    *path, unknown = location
    section = _section(root, path)
    valid = [field.alias or name for name, field in section.model_fields.items()] if section else []
    nearest = difflib.get_close_matches(unknown, valid, n=1, cutoff=0.5)
    message = f"unknown key `{'.'.join(location)}`"
    if nearest:
        return f"{message}; did you mean `{'.'.join([*path, nearest[0]])}`?"
    if valid:
        return f"{message}; remove it or use one of {', '.join(valid)}"
    return f"{message}; remove it"


def _explain_missing(root: type[BaseModel], location: list[str]) -> str:
    advice = "add it or extend base.yaml" if root is Config else "add it"
    return f"missing key `{'.'.join(location)}`; {advice}{_meaning(root, location)}"


def _explain_invalid(root: type[BaseModel], location: list[str], faults: list[ErrorDetails]) -> str:
    """Return the message about an invalid value of a key or section. `faults` has an entry for each allowed type."""
    first = faults[0]
    key = f"`{'.'.join(location)}`: " if location else ""
    reason = " or ".join(_reason(fault) for fault in faults)
    is_section = isinstance(first["input"], (dict, BaseModel))
    if is_section and first["type"] == _RAISED_BY_CHECK:
        return f"{key}{reason}"  # A check of a whole section; its message names the values and the next step.
    value = "" if is_section else f", not {without_secrets(first['input'], '.'.join(location))!r}"
    return f"{key}{reason}{value}; correct the value{_meaning(root, location)}"


def _reason(fault: ErrorDetails) -> str:
    """Return pydantic's message about a fault with a lower-case first letter, because it continues a sentence."""
    message = fault["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _key_path(fault: ErrorDetails) -> list[str]:
    """Return the path of the invalid key, without the type names that pydantic adds to the path for a union type."""
    parts = [str(part) for part in fault["loc"]]
    types = ("constrained-", "literal[", NUMBER_TAG, SCHEDULE_TAG)
    return [part for part in parts if not part.startswith(types)]


def _layer_of(layers: list[tuple[str, Tree]], location: Sequence[str]) -> str:
    """Return the name of the last layer (file or `--set`) that sets a key; if none does, the last layer's name."""
    for name, tree in reversed(layers):
        if _contains(tree, location):
            return name
    topmost_name, _ = layers[-1]
    return topmost_name


def _contains(tree: Tree, location: Sequence[str]) -> bool:
    node: Any = tree
    for part in location:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _section(root: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    """Return the class of the section at a path of keys (list indices are skipped); None if it has none."""
    section = root
    part_selects_element = False
    for part in location:
        if part_selects_element:
            part_selects_element = False
            continue
        field = _field(section, part)
        if field is None:
            return None
        inner_section = _section_class(field.annotation)
        if inner_section is None:
            return None
        section = inner_section
        part_selects_element = get_origin(field.annotation) in _COLLECTIONS
    return section


def _section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic class in a field's type, such as SECTION in `tuple[SECTION, ...]`; None for a plain type."""
    for part in (annotation, *get_args(annotation)):
        kind = get_args(part)[0] if get_origin(part) is Annotated else part
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _field(section: type[BaseModel], key: str) -> FieldInfo | None:
    for name, field in section.model_fields.items():
        if key == (field.alias or name):
            return field
    return None


def _meaning(root: type[BaseModel], location: Sequence[str]) -> str:
    """Return a key's description to end an error message with, such as ". micro_batch: Rows ..."; "" if none."""
    description = _description(root, location)
    return f". {location[-1]}: {description}" if description else ""


def _description(root: type[BaseModel], location: Sequence[str]) -> str:
    if not location:
        return ""
    *path, key = location
    section = _section(root, path)
    field = _field(section, key) if section else None
    if field is None:
        return ""
    return field.description or ""
