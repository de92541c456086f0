"""Read YAML files and command-line overrides into a `Config`, and write a `Config` as YAML.

Guarantee: every mistake in a config is a UserError of one line, which names the file with the line or the key (or
--set), the nearest valid key and the next step. The process then ends with exit code 78.

How: a config has layers, of which a later one replaces values of an earlier one: the files that the config file
extends (`extends: defaults.yaml`, relative to the file that extends), the config file itself, and each override such
as `--set train.micro_batch=32`. They are merged and validated as one tree. `sources` returns the layer that each value
comes from.

Limits: this module must not import torch, because commands on a login node load a config without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from electra_dist.config.config import Config
from electra_dist.config.keys import Tree, fields, flattened, nearest_key
from electra_dist.config.schedule import NUMBER_TAG, SCHEDULE_TAG
from electra_dist.config.secrets import without_secret_arguments, without_secrets
from electra_dist.config.sections.base import Section
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import read_regular
from electra_dist.store.patience import Patience, patient

S = TypeVar("S", bound=Section)

_UNKNOWN_KEY = "extra_forbidden"  # pydantic's types of faults
_MISSING_KEY = "missing"
_RAISED_BY_CHECK = "value_error"
_MESSAGES = {
    "tuple_type": "input should be a list, such as [A, B]",
    "dict_type": "input should be a section, with its keys indented below it",
    "model_type": "input should be a section, with its keys indented below it",
}  # in place of pydantic's, which name Python's classes

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


@patient
def load_config(path: str | Path, overrides: Sequence[str] = (), *, patience: Patience | None = None) -> Config:
    """Read and validate a config file with overrides, such as "train.micro_batch=32", whose values are YAML.

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
    """Read a section of class `kind` from a YAML file that holds the keys of this section and nothing else.

    Raises UserError for an invalid file. `extends` is an unknown key here.
    """
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
    source_of_key = dict.fromkeys(flattened(resolved), "default")
    for name, tree in read_layers(Path(path), overrides):
        for key in flattened(tree):
            # A later layer replaces the values of earlier ones; a number may have replaced a schedule, whose keys are
            # then not in the resolved config.
            if key in source_of_key:
                source_of_key[key] = name
    return source_of_key


def dump_yaml(config: Config) -> str:
    """Return the resolved config as YAML text, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _explain(error: ValidationError, layers: list[tuple[str, Tree]], root: type[BaseModel] = Config) -> str:
    """Return one line about the first mistake that validation found, with the number of other mistakes.

    `layers` are the files and overrides that the config was merged from; the line names the one with the mistake.
    """
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
    """Return the message about an unknown key; it names the key that is probably meant, or all keys of the section.

    `location` is the key's path, such as ["train", "micro_bach"].
    """
    unknown = ".".join(location)
    if "." in location[-1]:  # in a file, where only the indentation says what is in which section
        *sections, key = location[-1].split(".")
        if unknown in fields(root):
            layout = ", ".join(f"`{part}:` and indented below it" for part in sections)
            return f"unknown key `{unknown}`; a path with dots is for --set: in a file, write {layout} `{key}:`"
        return _explain_unknown(root, unknown.split("."))
    section, _, name = _general_key(root, location).rpartition(".")
    valid = [key.rpartition(".")[2] for key in fields(root) if key.rpartition(".")[0] == section]
    nearest = nearest_key(section, name, fields(root))
    message = f"unknown key `{unknown}`"
    if nearest:
        nearest_section, _, nearest_name = nearest.rpartition(".")
        if nearest_section == section:  # it is named as the user wrote it, with the number of an element
            nearest = ".".join([*location[:-1], nearest_name])
        return f"{message}; did you mean `{nearest}`?"
    if valid:
        return f"{message}; remove it or use one of {', '.join(valid)}"
    return f"{message}; remove it"


def _explain_missing(root: type[BaseModel], location: list[str]) -> str:
    advice = "add it or extend defaults.yaml" if root is Config else "add it"
    return f"missing key `{'.'.join(location)}`; {advice}{_meaning(root, location)}"


def _explain_invalid(root: type[BaseModel], location: list[str], faults: list[ErrorDetails]) -> str:
    """Return the message about an invalid value of a key or section; `faults` has an entry for each allowed type."""
    first = faults[0]
    key = f"`{'.'.join(location)}`: " if location else ""
    reason = " or ".join(_reason(fault) for fault in faults)
    is_section = isinstance(first["input"], (dict, BaseModel))
    if is_section and first["type"] == _RAISED_BY_CHECK:
        return f"{key}{reason}"  # A rule; its message names the values and the next step.
    value = "" if is_section else f", not {without_secrets(first['input'], '.'.join(location))!r}"
    return f"{key}{reason}{value}; correct the value{_meaning(root, location)}"


def _meaning(root: type[BaseModel], location: list[str]) -> str:
    """Return the end of an error message, a key with its description: ". micro_batch: Rows ..."; "" if it has none."""
    field = fields(root).get(_general_key(root, location))
    return f". {location[-1]}: {field.description}" if field and field.description else ""


def _general_key(root: type[BaseModel], location: Sequence[str]) -> str:
    """Return the general name of a value's place: ["data", "phases", "0", "corpus"] is in `data.phases[].corpus`.

    `keys.fields` lists the fields of a config under these names.
    """
    known = fields(root)
    key = ""
    for part in location:
        if part.isdigit():
            key += "[]"
        elif any(name.startswith(f"{key}.*") for name in known):
            key += ".*"
        else:
            key = f"{key}.{part}" if key else part
    return key


def _reason(fault: ErrorDetails) -> str:
    """Return pydantic's message about a fault with a lower-case first letter, because it continues a sentence.

    What pydantic calls by the name of a Python class is called as it is written in YAML.
    """
    message = _MESSAGES.get(fault["type"], fault["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _key_path(fault: ErrorDetails) -> list[str]:
    """Return the path of the invalid key, without the names of types that pydantic adds for a union."""
    parts = [str(part) for part in fault["loc"]]
    types = ("constrained-", "literal[", NUMBER_TAG, SCHEDULE_TAG)
    return [part for part in parts if not part.startswith(types)]


def _layer_of(layers: list[tuple[str, Tree]], location: Sequence[str]) -> str:
    """Return the name (file or `--set`) of the last layer that sets a key; if none does, the last layer's name."""
    topmost_name, _ = layers[-1]
    return next((name for name, tree in reversed(layers) if _contains(tree, location)), topmost_name)


def _contains(tree: Tree, location: Sequence[str]) -> bool:
    node: Any = tree
    for part in location:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


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
    """Return `path`, or the config file that comes with the package if `path` is configs/NAME and does not exist.

    So `--config configs/small.yaml` works in every working directory.
    """
    return path if path.exists() else _shipped_file(path) or path


def _shipped_file(path: Path) -> Path | None:
    """Return the file that comes with the package for a relative path configs/NAME; None if there is none."""
    if path.is_absolute() or path.parts[:1] != (CONFIGS_DIR,):
        return None
    package = Path(__file__).resolve().parents[1]
    # An installed package has the folder inside it, a checkout beside it.
    for folder in (package / CONFIGS_DIR, package.parent / CONFIGS_DIR):
        shipped = folder.joinpath(*path.parts[1:])
        if shipped.is_file():
            return shipped
    return None


def read_layers(path: Path, overrides: Sequence[str]) -> list[tuple[str, Tree]]:
    """Read a config file, all files that it extends, and the overrides, each as (file path or `--set`, tree of keys).

    A later one replaces values of an earlier one: first comes the file that extends no other, last the overrides.
    """
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
    """Raise UserError if `path`, which the last file of `chain` extends, does not exist or is in the chain itself.

    Each file of `chain` extends the next; it is empty if `path` is the file that the user has named.
    """
    names = " -> ".join(str(file) for file in (*chain, path))
    # `Path.resolve` raises for a loop of links, of which the next line says that there is no file.
    if os.path.realpath(path) in [os.path.realpath(file) for file in chain]:
        raise UserError(f"{path}: extends: the files extend one another in a circle ({names}); remove one `extends`")
    if chain and not path.exists():
        raise UserError(f"{chain[-1]}: extends: there is no file {path}; give a path relative to this file")


def _base_of(path: Path, name: object) -> Path | None:
    """Return the file that config file `path` extends: `name` beside it or in the package; None if `name` is None."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise UserError(
            f"{path}: extends: expected the path of one YAML file, not {name!r}; write extends: defaults.yaml"
        )
    base = path.parent / name
    return base if base.exists() else _shipped_file(Path(name)) or base


def read_yaml(path: Path) -> Tree:
    """Return the mapping in a YAML file; raise UserError if it is unreadable, not a mapping, or has a key twice."""
    try:
        text = read_regular(path, _MOST_YAML_BYTES).decode()
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such config file; check the path (the files that come with the project are in configs/, and "
            f"`electra-dist init FOLDER` writes one)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a readable YAML file in UTF-8") from error
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(_explain_yaml_error(path, error)) from None
    if not isinstance(tree, dict):
        found = "the file is empty" if tree is None else f"found a value of type {type(tree).__name__}"
        raise UserError(
            f"{path}: expected sections such as `train:`, but {found}; write the keys of a config (configs/ has "
            "examples)"
        )
    return tree


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text; raise YAMLError if it is not valid YAML, nested too deeply or too large."""
    loader = _UniqueKeyLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root)
        return loader.construct_document(root)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML raises these for a value that does not fit its tag, such as `!!int x` or the date 2026-13-41.
        raise yaml.YAMLError(f"a value cannot be read: {type(error).__name__}") from None
    finally:
        loader.dispose()


def _check_nodes(root: yaml.Node) -> None:
    """Raise YAMLError if a document is nested too deeply, has too many values, or has one that cannot be used.

    A node counts again for each alias (`*name`) or merge key (`<<`) that names it. A short text that would expand to
    a huge value is thus refused before it is expanded.
    """
    level = [root]
    num_values = 0
    for _ in range(_MAX_YAML_LEVELS):
        next_level: list[yaml.Node] = []
        for node in level:
            if isinstance(node, yaml.ScalarNode):
                _check_scalar(node)
            elif isinstance(node, yaml.MappingNode):
                next_level += [key_or_value for pair in node.value for key_or_value in pair]
            else:  # a list
                next_level += node.value
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
