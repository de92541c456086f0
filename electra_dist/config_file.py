"""YAML -> Config. A mistake is one line that names the file, the key and the nearest valid one (exit 78).

`extends: base.yaml` (relative to the file) is merged below it, one level deep: the base may not extend again, so at
most two files say what a run is. `--set train.micro_batch=32` comes last. `sources()` tells where each value is from.
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The validated config of `path` with `key.path=value` overrides.

    Raises:
        UserError: one line with the file (or --set), the key and the next step.
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
    """A YAML file of another kind than a run's config.

    Raises:
        UserError: as `load_config`.
    """
    tree = _read_yaml(path)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(_explain(error, [(str(path), tree)], kind)) from None


def sources(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """For every leaf of the resolved config: dotted key -> file name, `--set` or `default`."""
    layers = _layers(Path(path), overrides)
    origin = dict.fromkeys(_leaves(load_config(path, overrides).model_dump(mode="json")), "default")
    for name, layer in layers:
        origin.update(dict.fromkeys(_leaves(layer), name))
    return origin


def dump_yaml(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _layers(path: Path, overrides: Sequence[str]) -> list[tuple[str, Tree]]:
    tree = _read_yaml(path)
    layers = []
    base_name = tree.pop("extends", None)
    if base_name is not None:
        base_path = path.parent / str(base_name)
        base = _read_yaml(base_path)
        if "extends" in base:
            raise UserError(f"{base_path}: extends: only one level is allowed; merge {base['extends']} into it")
        layers.append((str(base_path), base))
    layers.append((str(path), tree))
    layers.extend(("--set", _parse_override(text)) for text in overrides)
    return layers


def _read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; the ones that come with the project are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections such as `train:`, found {type(tree).__name__}")
    return tree


def _parse_override(text: str) -> Tree:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: expected key.path=value, for example --set train.micro_batch=32")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML; quote it") from None
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return tree


def _merge(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _leaves(tree: Tree, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in tree.items():
        keys += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return keys


def _key_path(fault: ErrorDetails) -> list[str]:
    """Where in the config, without pydantic's names of the types that a key may have."""
    parts = [str(part) for part in fault["loc"]]
    return [part for part in parts if not part.startswith(("constrained-", "literal["))]


def _explain(error: ValidationError, layers: list[tuple[str, Tree]], root: type[BaseModel] = Config) -> str:
    """One line for the first fault; how many more there are at its end."""
    faults = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # a typo explains what it misses
    fault = faults[0]
    location = _key_path(fault)
    here = [other for other in faults if _key_path(other) == location]  # a key of several types has a fault for each
    key = ".".join(location)
    where = next((name for name, layer in reversed(layers) if _contains(layer, location)), layers[-1][0])
    if fault["type"] == "extra_forbidden":
        message = f"unknown key `{key}`{_nearest(root, location)}"
    elif fault["type"] == "missing":
        message = f"missing key `{key}` ({_field_description(root, location)}); add it" + " or extend base.yaml" * (
            root is Config
        )
    else:
        reason = " or ".join(other["msg"].removeprefix("Value error, ") for other in here)
        given = "" if isinstance(fault["input"], (dict, BaseModel)) else f", not {fault['input']!r}"
        described = _field_description(root, location)
        message = f"`{key}`: " if key else ""
        message += reason[0].lower() + reason[1:] + given + (f" ({described})" if described else "")
    more = f" [and {len(faults) - len(here)} more]" if len(faults) > len(here) else ""
    return f"{where}: {message}{more}"


def _contains(layer: Any, location: Sequence[str]) -> bool:
    for part in location:
        if not isinstance(layer, dict) or part not in layer:
            return False
        layer = layer[part]
    return True


def _nearest(root: type[BaseModel], location: Sequence[str]) -> str:
    section = _section(root, location[:-1])
    valid = list(section.model_fields) if section else []
    near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.5)
    if near:
        return f"; did you mean `{'.'.join([*location[:-1], near[0]])}`?"
    return f"; valid here: {', '.join(valid)}" if valid else ""


def _section(root: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    """The section at `location` below `root`; numbers and names in a list or mapping of sections are passed over."""
    section, is_name = root, False
    for part in location:
        if is_name:
            is_name = False
            continue
        field = section.model_fields.get(part)
        is_name = field is not None and get_origin(field.annotation) in _COLLECTIONS
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return None
        section = inner[0]
    return section


def _field_description(root: type[BaseModel], location: Sequence[str]) -> str:
    section = _section(root, location[:-1]) if location else None
    field = section.model_fields.get(location[-1]) if section else None
    return (field.description or "") if field else ""
