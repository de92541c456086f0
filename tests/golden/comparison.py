"""The records of the golden set: how they are written, read and compared.

A record is a JSON file that maps the name of each entry of a kind to what a run, a command or a file gave. Where the
bits depend on the kind of CPU and on torch, each kind of machine has a record of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from golden.doors import has_cpu_library

RECORDS = Path(__file__).parent / "records"
Entries = dict[str, Any]

# Instructions by which torch chooses other kernels, whose sums round differently.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


class Kind(NamedTuple):
    """One kind of entries."""

    name: str
    about: str
    names: Callable[[], list[str]]  # of all entries
    make: Callable[[str, Path], Any]  # entry from its name, in an empty folder
    is_of_a_cpu: bool = False  # whether the bits hold only on one kind of CPU


def machine() -> str:
    """Return what the bits of a training depend on: the kind of CPU, the kernels' C library, and torch."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    cpu = [facts.get(name, "?") for name in ("vendor_id", "cpu family", "model", "cache size")]
    instructions = [name for name in _INSTRUCTIONS if name in facts.get("flags", "").split()]
    library = "C library" if has_cpu_library() else "no C library"
    return f"{' '.join([*cpu, *instructions])}, {library}, torch {torch.__version__.split('+')[0]}"


def read_record(kind: Kind, folder: Path = RECORDS) -> tuple[str, Entries]:
    """Return the machine that made the record of a kind ("" if the entries hold on every one), and its entries.

    Of several records, that of this kind of machine is returned if there is one.
    """
    own = _record_file(kind, folder)
    file = own if own.exists() else min(folder.glob(f"{kind.name}*.json"), default=own)
    tree = json.loads(file.read_text(encoding="utf-8"))
    return tree["machine"], tree["entries"]


def write_record(kind: Kind, entries: Entries, folder: Path = RECORDS) -> None:
    """Write the record of a kind, one line for each value."""
    tree = {"about": kind.about, "machine": machine() if kind.is_of_a_cpu else "", "entries": entries}
    text = json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=True)
    folder.mkdir(exist_ok=True)
    _record_file(kind, folder).write_text(text + "\n", encoding="utf-8")


def _record_file(kind: Kind, folder: Path) -> Path:
    """Return the file of the record of a kind, whose name has a digest of this machine if the bits depend on it."""
    suffix = f"-{hashlib.sha256(machine().encode()).hexdigest()[:8]}" if kind.is_of_a_cpu else ""
    return folder / f"{kind.name}{suffix}.json"


def differences(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each value that differs, with its place in the entry."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}):
            where = f"{place}.{key}" if place else key
            if key not in found:
                yield f"{where}: missing, was {_short(expected[key])}"
            elif key not in expected:
                yield f"{where}: new, {_short(found[key])}"
            else:
                yield from differences(expected[key], found[key], where)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{place}: {len(found)} values instead of {len(expected)}"
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f"{place}[{number}]")
    elif expected != found:
        yield f"{place}: {_short(found)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else f"{text[:160]}..."
