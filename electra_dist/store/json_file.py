"""Read JSON, and write it in a form of which equal values have equal digests.

Every reader of a JSON file or of a line of JSON uses this module, which reports all damage alike.

`read_document` and `find_document` read a whole file as the type of its content. An object of a store that is wrong is
read again first, because a service or a proxy may have sent another body (`Store.reread`).

Text that a corpus is built from is read by `corpus/`, which leaves out a damaged document and counts it.

Guarantee: bytes that are not valid JSON end as a `DamagedJson` with a reason of one line, whatever is wrong with them:
torn or empty text, bytes that are not UTF-8, thousands of nested lists, or an integer of thousands of digits. No
integer that is returned has more than 64 bits, so that arithmetic with it and its conversion to a float succeed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import read_regular, readable
from electra_dist.store.interface import Store

T = TypeVar("T")

_OBJECT = TypeAdapter(dict[str, Any])

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


def canonical_json(tree: Any) -> str:
    """Return a value as JSON with sorted keys, without spaces, in ASCII, so that equal values have equal digests.

    Raises ValueError if the tree holds NaN or an infinity, which JSON does not have.
    """
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def parse_json_object(data: bytes | str) -> dict[str, Any]:
    """Return the object in a JSON text; raise DamagedJson if it is damaged or another value than an object."""
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


def read_document(path: Path, kind: type[T] | TypeAdapter[T], next_step: str) -> T:
    """Return the JSON object in a local file, converted to `kind`.

    Raises StoreMissing if there is no file, UserError if it is damaged. `next_step` ends the message about a damaged
    file: what the user can do, as an imperative.
    """
    with readable(path):
        data = read_regular(path)
    return parse_document(data, path, kind, next_step)


def find_document(
    place: Path | tuple[Store, str],
    kind: type[T] | TypeAdapter[T],
    next_step: str,
    error_class: type[UserError] = UserError,
) -> T | None:
    """Return the JSON object in a local file or in an object of a store (store, key), or None if there is none.

    It is converted to `kind`. If it is damaged, `error_class` is raised; `next_step` ends the message with what the
    user can do.
    """
    if isinstance(place, Path):
        return read_document(place, kind, next_step) if place.exists() else None
    store, key = place

    def read() -> T | None:
        data = store.read_or_none(key)
        if data is None:
            return None
        return parse_document(data, f"{store.url}/{key}", kind, next_step, error_class)

    return store.verified(key, read)


def parse_document(
    data: bytes,
    place: Path | str,
    kind: type[T] | TypeAdapter[T],
    next_step: str,
    error_class: type[UserError] = UserError,
) -> T:
    """Return the JSON object in `data`, the content of the file `place`, converted to `kind`.

    If it is damaged, `error_class` is raised, whose message ends with `next_step`: what the user can do, as an
    imperative.
    """
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return validate_json(adapter, parse_json_object(data))
    except DamagedJson as error:
        raise damaged_file(place, error, next_step, error_class) from None


def read_json_object(path: Path, next_step: str) -> dict[str, Any]:
    """Return the JSON object in a local file, whatever its keys are.

    Raises StoreMissing if there is no file, UserError if it is damaged; `next_step` then says what the user can do.
    """
    return read_document(path, _OBJECT, next_step)


def damaged_file(
    place: Path | str, error: DamagedJson, next_step: str, error_class: type[UserError] = UserError
) -> UserError:
    """Return, not raise, the error about a damaged JSON file; `next_step` tells the user what to do."""
    return error_class(f"{place}: damaged, because {error}; {next_step}")


class Difference(NamedTuple):
    """Place at which two JSON trees differ: the key, and the value that each tree has there."""

    key: str  # dotted, such as "model.encoder.layers" or "sources.0.path"
    old: object  # None if the first tree lacks the key
    new: object


def first_difference(old: object, new: object, key: str = "") -> Difference | None:
    """Return the first value in which two JSON trees differ; None if they are equal. Callers leave `key` empty.

    Values are compared depth first: keys in the order of `old`, then those that only `new` has. Lists of objects are
    compared object by object, other lists as a whole.
    """
    if _has_objects(old) and _has_objects(new):
        old = dict(enumerate(cast(list[object], old)))
        new = dict(enumerate(cast(list[object], new)))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            inner_key = f"{key}.{name}" if key else str(name)
            difference = first_difference(old.get(name), new.get(name), inner_key)
            if difference is not None:
                return difference
        return None
    return None if old == new else Difference(key, old, new)


def _has_objects(tree: object) -> bool:
    return isinstance(tree, list) and any(isinstance(child, dict) for child in tree)


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
