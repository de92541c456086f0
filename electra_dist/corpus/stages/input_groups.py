"""Divide the input files of a build into groups, the units of work in which workers read them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from electra_dist.config import canonical_json
from electra_dist.corpus.inputs.find_inputs import InputFile


class InputGroup(NamedTuple):
    """Consecutive input files, which one worker reads. How files are grouped has no influence on the corpus."""

    number: int  # position of the group, from 0
    files: range  # positions of its files among the inputs
    size: int  # bytes of its files, as they are on disk
    digest: str  # SHA-256 of the names and sizes of its files, in hexadecimal
    modified: str  # SHA-256 of the times at which its local files were last modified, in hexadecimal


def group_inputs(files: Sequence[InputFile], group_bytes: int) -> list[InputGroup]:
    """Divide the input files into groups of `group_bytes` on disk or more; only the last group may be smaller."""
    groups: list[InputGroup] = []
    first = 0
    size = 0
    for position, file in enumerate(files):
        size += file.size
        if size >= group_bytes or position == len(files) - 1:
            group_files = [files[index] for index in range(first, position + 1)]
            digest = _digest([[file.name, file.size] for file in group_files])
            modified = _digest([file.path.stat().st_mtime_ns for file in group_files if file.store is None])
            groups.append(InputGroup(len(groups), range(first, position + 1), size, digest, modified))
            first = position + 1
            size = 0
    return groups


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()
