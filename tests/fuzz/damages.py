"""Damages of files: a hypothesis strategy that draws one for a file, and the damaged bytes that it gives.

A damage changes single bytes (flips, cuts, insertions, an emptied file), or the structure of the content: a value of
a JSON or YAML tree, a field of a header of safetensors, .npy or tar. A digest that a file has of itself is made again
after a change of its structure, because otherwise the digest would be all that is ever tested.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from hypothesis import strategies as st

from electra_dist.store.json_file import canonical_json

# JSON texts that take the place of a value: wrong types, numbers out of range, texts that mislead, deep nesting.
VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "1.5", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "1e308"),
    *("9" * 15, "9" * 18, "9" * 20, "9" * 400, "1" * 5000, "-" + "9" * 19, "18446744073709551615", "9007199254740993"),
    *('""', '"x"', '"0"', '"NaN"', '"\\u0000"', '"a\\nb"', '"\\ud800"', '"' + "x" * 100_000 + '"', '"[red]"', '"[/]"'),
    *('"../outside/x"', '"/dev/null/x"', '"<script>"', '"2026-13-45T00:00:00"', '"0001-01-01T00:00:00"'),
    *("[]", "{}", "[[]]", '[{"a": 1}]', '{"a": {"b": []}}', "[null]", "[1, 2, 3]", '["x"]', '{"step": 1}'),
    *("[" * 60 + "]" * 60, "[" * 400 + "]" * 400, "[" * 100_000 + "]" * 100_000, '{"a":' * 300 + "1" + "}" * 300),
)
YAML_VALUES = (
    *(
        "!!int x",
        "!!float x",
        "!!bool maybe",
        "!!timestamp x",
        "!!binary x",
        "!!python/object:os.system {}",
        "!!set {a}",
    ),
    *(
        "2026-13-41",
        "2026-01-01",
        ".inf",
        "-.nan",
        "0x1F",
        "1_000",
        "&a [*a]",
        "*missing",
        "? [a, b] : c",
        "'",
        "{",
        "|",
    ),
    *("&a [1, 1, 1, 1, 1, 1, 1, 1, 1]", "9" * 5000, "[" * 2000, "\x00", "\ufeff", "~", "12:30:45", "<<: {a: 1}"),
)
BYTES = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r\n", b"{", b"}", b'"', b"\0" * 512)
CONTENTS = (
    *(
        b"",
        b"\n",
        b"null",
        b"[]",
        b"{}",
        b"0",
        b"{",
        b"\0" * 4096,
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\0}\0",
        b"[" * 100_000,
    ),
    *(b"1" * 5000, b'{"a": 1}\n{"a": 1}\n', b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", b"a: 1\n"),
    *(
        b"PK\x03\x04",
        b"\x80\x04.",
        struct.pack("<Q", 1 << 63),
        struct.pack("<q", -8),
        struct.pack("<Q", 8) + b"        ",
    ),
)
SIZES = (0, 1, 7, 8, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)
NEGATIVE_SIZES = (-1, -8, -512, -513, -1024, -(1 << 62))


@dataclass(frozen=True)
class Damage:
    """One damage: how it is done, where (a share of the file's places in [0, 1)), and with which value."""

    how: str
    where: float = 0.0
    value: Any = None


def _bytes_damages() -> st.SearchStrategy[Damage]:
    where = st.floats(0, 1, exclude_max=True)
    return st.one_of(
        st.builds(Damage, st.just("flip"), where, st.integers(0, 7)),
        st.builds(Damage, st.just("cut"), where),
        st.builds(Damage, st.just("delete"), where, st.integers(1, 64)),
        st.builds(Damage, st.just("insert"), where, st.sampled_from(BYTES)),
        st.builds(Damage, st.just("insert"), where, st.binary(min_size=1, max_size=8)),
        st.builds(Damage, st.just("overwrite"), where, st.binary(min_size=1, max_size=8)),
        st.builds(Damage, st.just("repeat"), where, st.integers(1, 256)),
        st.builds(Damage, st.just("content"), st.just(0.0), st.sampled_from(CONTENTS)),
    )


def _tree_damages(values: tuple[str, ...]) -> st.SearchStrategy[Damage]:
    where = st.floats(0, 1, exclude_max=True)
    return st.one_of(
        st.builds(Damage, st.just("set"), where, st.sampled_from(values)),
        st.builds(Damage, st.just("set"), where, st.integers(-(1 << 70), 1 << 70).map(str)),
        st.builds(Damage, st.just("set"), where, st.floats().map(json.dumps)),
        st.builds(Damage, st.just("set"), where, st.text(max_size=20).map(json.dumps)),
        st.builds(Damage, st.just("remove"), where),
        st.builds(Damage, st.just("rename"), where, st.sampled_from(("x", "", "step", "__class__", "\ud800"))),
        st.builds(Damage, st.just("swap"), where, st.floats(0, 1, exclude_max=True)),
    )


_SIZE_DAMAGES = {
    "safetensors": st.builds(Damage, st.just("header_size"), st.just(0.0), st.sampled_from(SIZES)),
    "npy": st.builds(Damage, st.just("shape"), st.just(0.0), st.sampled_from((*SIZES, *NEGATIVE_SIZES))),
    "tar": st.one_of(
        st.builds(Damage, st.just("member_size"), st.just(0.0), st.sampled_from((*SIZES, *NEGATIVE_SIZES))),
        st.builds(Damage, st.just("shape"), st.just(0.0), st.sampled_from((*SIZES, *NEGATIVE_SIZES))),
    ),
}


def damages(kind: str) -> st.SearchStrategy[Damage]:
    """Return the damages of a file: by byte and, for a kind with a structure, by structure twice as often.

    Args:
        kind: "json", "record", "jsonl", "yaml", "manifest", "heartbeat", "safetensors", "npy", "tar" or "text".
    """
    by_structure = []
    if kind in ("json", "record", "jsonl", "manifest", "heartbeat", "safetensors"):
        by_structure = [_tree_damages(VALUES)]
    elif kind == "yaml":
        by_structure = [_tree_damages(VALUES), _tree_damages(YAML_VALUES)]
    if kind in _SIZE_DAMAGES:
        by_structure.append(_SIZE_DAMAGES[kind])
    return st.one_of(_bytes_damages(), *by_structure, *by_structure)


def damaged(content: bytes, kind: str, damage: Damage) -> bytes:
    """Return the content of a file of a kind after a damage."""
    if damage.how in ("set", "remove", "rename", "swap"):
        return _STRUCTURES[kind](content, damage)
    if damage.how == "header_size":
        return struct.pack("<Q", damage.value) + content[8:]
    if damage.how == "member_size":
        return _with_member_size(content, damage.value)
    if damage.how == "shape":
        return _with_shape(content, damage.value)
    return _damaged_bytes(content, damage)


def _damaged_bytes(content: bytes, damage: Damage) -> bytes:
    at = int(damage.where * len(content))
    value = damage.value
    if damage.how == "content":
        return bytes(value)
    if damage.how == "cut":
        return content[:at]
    if damage.how == "delete":
        return content[:at] + content[at + value :]
    if damage.how == "insert":
        return content[:at] + value + content[at:]
    if damage.how == "overwrite":
        return content[:at] + value + content[at + len(value) :]
    if damage.how == "repeat":
        return content[:at] + content[at : at + value] + content[at:]
    assert damage.how == "flip"
    if not content:
        return b"\1"
    return content[:at] + bytes([content[at] ^ 1 << value]) + content[at + 1 :]


_PLACEHOLDER = "@@damaged value@@"  # in a tree; its text is replaced after the tree was written


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values of a tree, the whole tree first."""
    paths = [path]
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        paths += _places(child, (*path, key))
    return paths


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _damaged_tree(tree: Any, damage: Damage) -> tuple[Any, str]:
    """Return a changed tree, and the text that takes the place of the placeholder in it."""
    paths = _places(tree)
    *path, key = ((), *paths[int(damage.where * len(paths))])  # the root has an empty path
    if damage.how == "swap":
        other = _at(tree, paths[int(damage.value * len(paths))])
        if len(path) == 0:
            return other, ""
        _at(tree, tuple(path[1:]))[key] = json.loads(json.dumps(other))
        return tree, ""
    if len(path) == 0:
        return _PLACEHOLDER, damage.value if damage.how == "set" else "null"
    parent = _at(tree, tuple(path[1:]))
    if damage.how == "set":
        parent[key] = _PLACEHOLDER
    elif damage.how == "rename" and isinstance(parent, dict):
        parent[damage.value] = parent.pop(key)
    else:
        del parent[key]
    return tree, str(damage.value)


def _json_text(tree: Any, text: str, indent: int | None = None) -> bytes:
    return json.dumps(tree, indent=indent).replace(f'"{_PLACEHOLDER}"', text).encode("utf-8", "surrogatepass")


def _damaged_json(content: bytes, damage: Damage) -> bytes:
    return _json_text(*_damaged_tree(json.loads(content), damage)) + b"\n"


def _damaged_record(content: bytes, damage: Damage) -> bytes:
    """Damage the JSON of a record of a build and leave out the digest after it, which would give every damage away."""
    return _damaged_json(content.partition(b"\n")[0], damage)


def _damaged_lines(content: bytes, damage: Damage) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return b"\n"
    share = damage.where * len(lines)
    number = int(share)
    in_line = Damage(damage.how, share - number, damage.value)
    return b"".join([*lines[:number], _damaged_json(lines[number], in_line), *lines[number + 1 :]])


def _damaged_yaml(content: bytes, damage: Damage) -> bytes:
    tree, text = _damaged_tree(yaml.safe_load(content), damage)
    written = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=1000)
    return written.replace(f"'{_PLACEHOLDER}'", text).encode("utf-8", "surrogatepass")


def _damaged_manifest(content: bytes, damage: Damage) -> bytes:
    """Damage a checkpoint's manifest and make its digest again, where the result is still JSON."""
    tree = json.loads(content)
    del tree["sha256"]
    data = _json_text(*_damaged_tree(tree, damage))
    try:
        changed = json.loads(data)
        digest = hashlib.sha256(canonical_json(changed).encode()).hexdigest()
        return canonical_json({**changed, "sha256": digest}).encode() + b"\n"
    except (ValueError, RecursionError, TypeError):
        return data


def _damaged_heartbeat(content: bytes, damage: Damage) -> bytes:
    """Damage a heartbeat and make its checksum and its length again."""
    tree = json.loads(content)
    del tree["crc"]
    body = _json_text(*_damaged_tree(tree, damage)).removesuffix(b"}")
    line = body + b', "crc": %d}' % zlib.crc32(body)
    return line.ljust(len(content) - 1) + b"\n"


def _damaged_safetensors(content: bytes, damage: Damage) -> bytes:
    """Damage the header of a safetensors file and correct its length."""
    header_bytes = int.from_bytes(content[:8], "little")
    header = _damaged_json(content[8 : 8 + header_bytes], damage)
    return struct.pack("<Q", len(header)) + header + content[8 + header_bytes :]


def _with_member_size(content: bytes, size: int) -> bytes:
    """Set the size in the header of a tar's first member, in the binary form, and correct the header's checksum."""
    limited = max(-(1 << 64), min(size, (1 << 64) - 1))
    field = b"\x80" + limited.to_bytes(11, "big") if limited >= 0 else limited.to_bytes(12, "big", signed=True)
    header = content[:124] + field + content[136:148] + b" " * 8 + content[156:512]
    return header[:148] + b"%06o\0 " % sum(header) + content[156:]


def _with_shape(content: bytes, length: int) -> bytes:
    """Set the first length in the header of the first .npy array in the content, padded to the header's length."""
    at = content.find(b"\x93NUMPY")
    if at < 0:
        return content
    header_bytes = int.from_bytes(content[at + 8 : at + 10], "little")
    header = content[at + 10 : at + 10 + header_bytes].decode("latin-1")
    before, _, after = header.partition("'shape': (")
    _, comma, rest = after.partition(",")
    changed = f"{before}'shape': ({length}{comma}{rest.rstrip()}"[: header_bytes - 1].ljust(header_bytes - 1) + "\n"
    return content[: at + 10] + changed.encode("latin-1") + content[at + 10 + header_bytes :]


_STRUCTURES: dict[str, Callable[[bytes, Damage], bytes]] = {
    "json": _damaged_json,
    "record": _damaged_record,
    "jsonl": _damaged_lines,
    "yaml": _damaged_yaml,
    "manifest": _damaged_manifest,
    "heartbeat": _damaged_heartbeat,
    "safetensors": _damaged_safetensors,
}
