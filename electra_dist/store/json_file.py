"""Read JSON. Every reader of a JSON file or of a line of JSON uses this module, which reports all damage alike.

Text that a corpus is built from is read by `corpus/`, which leaves out a damaged document and counts it.

Guarantee: bytes that are not valid JSON end as a `DamagedJson` with a reason of one line, whatever is wrong with them:
torn or empty text, bytes that are not UTF-8, thousands of nested lists, or an integer of thousands of digits. No
integer that is returned has more than 64 bits, so that arithmetic with it and its conversion to a float succeed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import readable
from electra_dist.store.regular_files import read_regular

T = TypeVar("T")

_MAX_DEPTH = 100  # of lists and objects within one another; a recursive function over them stays far from its limit
_TOO_DEEP = "it is not JSON of this project (nested too deeply)"
# Only an integer of so many digits can have more than 64 bits. Most texts have none and are parsed at full speed.
_LONG_NUMBER = re.compile(r"\d{19}")


class DamagedJson(ValueError):
    """Error for bytes that are not JSON, or whose JSON value has another shape than expected; the message says why."""


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text in UTF-8 (byte order mark and NaN are accepted), or raise DamagedJson."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        has_long_number = _LONG_NUMBER.search(text) is not None
        tree = json.loads(text, parse_int=_parse_int) if has_long_number else json.loads(text)
    except RecursionError:
        raise DamagedJson(_TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise DamagedJson(f"it is not JSON (byte {error.start} is not UTF-8)") from None
    except json.JSONDecodeError as error:
        reason = "it is empty" if not text.strip() else str(error)
        raise DamagedJson(f"it is not JSON ({reason})") from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deep(tree):
        raise DamagedJson(_TOO_DEEP)
    return tree


def parse_json_object(data: bytes | str) -> dict[str, Any]:
    """Return the object in a JSON text; raise DamagedJson for damaged JSON and for a value that is not an object."""
    tree = parse_json(data)
    if not isinstance(tree, dict):
        raise DamagedJson("it is not a JSON object")
    return tree


def validate_json(kind: TypeAdapter[T], tree: object) -> T:
    """Convert a parsed JSON value to the type that `kind` describes; raise DamagedJson about the first wrong key."""
    try:
        return kind.validate_python(tree)
    except ValidationError as error:
        raise DamagedJson(first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """Return the first fault that pydantic found in a value, as one line: the key and what is wrong with it."""
    fault = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(str(part) for part in fault["loc"])
    reason = fault["msg"].removeprefix("Value error, ")
    return f"the value of `{key}` is wrong: {reason}" if key else reason


def read_json_object(path: Path, next_step: str) -> dict[str, Any]:
    """Return the JSON object in a local file; raise UserError for damage, StoreMissing for a missing file.

    `next_step` ends the message about a damaged file: what the user can do, as an imperative.
    """
    with readable(path):
        data = read_regular(path)
    try:
        return parse_json_object(data)
    except DamagedJson as error:
        raise damaged_file(path, error, next_step) from None


def read_json_as(path: Path, kind: TypeAdapter[T], next_step: str) -> T:
    """Read a local JSON file as the type of `kind`, such as a dataclass; raise the errors of `read_json_object`."""
    tree = read_json_object(path, next_step)
    try:
        return validate_json(kind, tree)
    except DamagedJson as error:
        raise damaged_file(path, error, next_step) from None


def damaged_file(place: Path | str, error: DamagedJson, next_step: str) -> UserError:
    """Return the error to raise for a damaged JSON file. `next_step` tells the user what to do."""
    return UserError(f"{place}: damaged, because {error}; {next_step}")


def _is_deep(tree: object) -> bool:
    level = [tree] if isinstance(tree, (dict, list)) else []
    for _ in range(_MAX_DEPTH + 1):
        containers = [value.values() if isinstance(value, dict) else value for value in level]
        level = [child for children in containers for child in children if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= 1 << 64:
        raise DamagedJson(f"it is not JSON of this project (a number of {len(digits)} digits)")
    return int(digits)
