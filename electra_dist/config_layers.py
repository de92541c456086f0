"""Read the layers of a config: a YAML file, the files that it extends, and the overrides of the command line.

Guarantee: a file that cannot be read, a key that a mapping has twice, files that extend one another in a circle and an
override that is not KEY=VALUE are UserErrors. Their message is one line that names the file with the line, or the
override, and the next step.

How: `extends: base.yaml` names a file relative to the one that extends it, and that file may extend another one. The
layers come in the order in which they are merged: the last file of the chain first, the config file itself after it,
then the overrides. A later layer replaces values of earlier ones.

Limits: this module must not import torch, because commands on a login node load a config without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from electra_dist.config_sections.secrets import without_secret_arguments
from electra_dist.errors import UserError
from electra_dist.store.regular_files import read_regular

Tree = dict[str, Any]

CONFIGS_DIR = "configs"
_MAX_YAML_LEVELS = 50  # of lists and mappings within one another
_MAX_YAML_VALUES = 100_000
_MOST_YAML_BYTES = 1 << 20
_MOST_DIGITS = 100  # characters of a number; Python needs quadratic time for a long one, and prints none of 4,301
_NO_CHARACTER = re.compile("[\0\ud800-\udfff]")
_OVERRIDE = "--set"  # Name of a layer that comes from the command line instead of a file.
_SCHEDULE_KEYS = frozenset({"from", "to", "shape"})  # A mapping with all of these is a whole schedule.
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE_KEY = "<<"  # YAML's own key, which may occur several times in a mapping


class _DuplicateKey(yaml.constructor.ConstructorError):
    """Error for a key that a mapping of a YAML file has twice."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses a mapping with the same key twice; PyYAML's own loader would take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        line_of_key: dict[str, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str) or key == _MERGE_KEY:
                continue
            line = key_node.start_mark.line + 1  # the parser counts from 0
            if key in line_of_key:
                problem = f"the key `{key}` is set twice in one section, first in line {line_of_key[key]}"
                raise _DuplicateKey(None, None, problem, key_node.start_mark)
            line_of_key[key] = line
        return super().construct_mapping(node, deep)


def find_config_file(path: Path) -> Path:
    """Return `path`, or the packaged config file if `path` is configs/NAME and does not exist.
    Packaged files are found from every working directory, so that `--config configs/small.yaml` needs no
    checkout.
    """
    if path.exists():
        return path
    shipped = _shipped_file(path)
    return path if shipped is None else shipped


def _shipped_file(path: Path) -> Path | None:
    """Return the packaged config file for a relative path configs/NAME; None for other paths and unknown names."""
    if path.is_absolute() or path.parts[:1] != (CONFIGS_DIR,):
        return None
    package = Path(__file__).resolve().parent
    # An installed package has the folder inside it, a checkout beside it.
    for folder in (package / CONFIGS_DIR, package.parent / CONFIGS_DIR):
        shipped = folder.joinpath(*path.parts[1:])
        if shipped.is_file():
            return shipped
    return None


def read_layers(path: Path, overrides: Sequence[str]) -> list[tuple[str, Tree]]:
    """Return a config's layers, base file first and overrides last, each as (file path or `--set`, tree of keys)."""
    layers = [(_OVERRIDE, parse_override(text)) for text in overrides]
    chain: list[Path] = []
    next_path: Path | None = find_config_file(path)
    while next_path is not None:
        _check_chain(chain, next_path)
        chain.append(next_path)
        tree = read_yaml(next_path)
        layers.insert(0, (str(next_path), tree))
        next_path = _base_of(next_path, tree.pop("extends", None))
    return layers


def _check_chain(chain: Sequence[Path], path: Path) -> None:
    """Raise UserError if `path`, which the last file of `chain` extends, does not exist or is already in `chain`."""
    names = " -> ".join(str(file) for file in (*chain, path))
    # `Path.resolve` raises for a loop of links, of which the next line says that there is no file.
    if os.path.realpath(path) in [os.path.realpath(file) for file in chain]:
        raise UserError(f"{path}: extends: the files extend one another in a circle ({names}); remove one `extends`")
    if chain and not path.exists():
        raise UserError(f"{chain[-1]}: extends: there is no file {path}; give a path relative to this file")


def _base_of(path: Path, name: object) -> Path | None:
    """Return the file that config file `path` extends: `name`, beside `path` or packaged. None if `name` is None."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise UserError(f"{path}: extends: expected the path of one YAML file, not {name!r}; write extends: base.yaml")
    base = path.parent / name
    if base.exists():
        return base
    shipped = _shipped_file(Path(name))
    return base if shipped is None else shipped


def read_yaml(path: Path) -> Tree:
    """Return the mapping in a YAML file; raise UserError if it is unreadable, not a mapping, or has a key twice."""
    try:
        text = read_regular(path, _MOST_YAML_BYTES).decode()
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such config file; check the path (the files that come with the project are in configs/)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a readable YAML file in UTF-8") from error
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(_explain_yaml_error(path, error)) from None
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: expected sections such as `train:`, found {type(tree).__name__}; write the keys of a config "
            f"(configs/ has examples)"
        )
    return tree


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text; raise YAMLError if it is not valid YAML, nested too deeply or too large."""
    try:
        tree = _load_yaml(text)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML raises these for a value that does not fit its tag, such as `!!int x` or the date 2026-13-41.
        raise yaml.YAMLError(f"a value cannot be read: {type(error).__name__}") from None
    return tree


def _load_yaml(text: str) -> Any:
    loader = _UniqueKeyLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check_nodes(root: yaml.Node) -> None:
    """Raise YAMLError for too many levels, too many values, or a value that cannot be used.
    A node counts again for each alias (`*name`) or merge key (`<<`) that names it. A short text that would expand to
    a huge value is thus refused before it is expanded.
    """
    level = [root]
    num_values = 0
    for _ in range(_MAX_YAML_LEVELS):
        next_level: list[yaml.Node] = []
        for node in level:
            if isinstance(node, yaml.MappingNode):
                next_level.extend(child for pair in node.value for child in pair)
            elif isinstance(node, yaml.SequenceNode):
                next_level.extend(node.value)
            else:
                _check_scalar(node)
            if num_values + len(next_level) > _MAX_YAML_VALUES:
                raise yaml.YAMLError(f"it has more than {_MAX_YAML_VALUES:,} values")
        num_values += len(next_level)
        level = next_level
        if not level:
            return
    raise yaml.YAMLError("it is nested too deeply")


def _check_scalar(node: yaml.Node) -> None:
    """Raise YAMLError for NUL or half a surrogate pair in a text, and for a number of very many digits."""
    if _NO_CHARACTER.search(node.value):
        raise yaml.YAMLError("a text has a character that is in no file name: NUL or half of a surrogate pair")
    if node.tag in _NUMBER_TAGS and len(node.value) > _MOST_DIGITS:
        raise yaml.YAMLError(f"a number has {len(node.value):,} characters, more than {_MOST_DIGITS}")


def _explain_yaml_error(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    position = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)  # the parser counts from 0
    problem = getattr(error, "problem", error)
    if isinstance(error, _DuplicateKey):
        return f"{position}: {problem}; keep one of the two"
    return f"{position}: not valid YAML ({problem}); correct this place"


def parse_override(text: str) -> Tree:
    """Return the tree of one override: {"train": {"micro_batch": 32}} for "train.micro_batch=32"."""
    key, equals, value = text.partition("=")
    key = key.strip()
    [shown] = without_secret_arguments([text])
    if not equals or not key:
        raise UserError(f"--set {shown}: expected key.path=value; write for example --set train.micro_batch=32")
    try:
        tree: Any = parse_yaml(value)
    except _DuplicateKey as error:
        raise UserError(f"--set {shown}: {error.problem}; keep one of the two") from None
    except yaml.YAMLError:
        raise UserError(f"--set {shown}: the value is not valid YAML; put the value in quotes") from None
    # Wrap the value in mappings, from the innermost key outwards.
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def merge(below: Tree, above: Tree) -> Tree:
    """Merge two trees into a new one, section by section; a value in `above` replaces the value in `below`.
    A complete schedule replaces the value in `below` as a whole, because a schedule's keys depend on its shape.
    """
    merged = dict(below)
    for key, value in above.items():
        are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        if are_sections and not _SCHEDULE_KEYS.issubset(value):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged
