"""Read files of JSON lines in parts: forwards in blocks, or backwards from the newest record.

Guarantee: the same records as `jsonl.read_records` returns, one at a time, and the same one-line error for a line that
is not a JSON object. A torn last line is left out. The file may grow while it is read. At most one block and one line
are in memory.

Limits: lines that a reader does not ask for are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from electra_dist.run.jsonl import Record, damaged_line, parse_record
from electra_dist.store.atomic_files import readable
from electra_dist.store.regular_files import open_regular

Check = Callable[[Record], str]  # a record -> what is wrong with it; "" for a good record
Line = tuple[int, bytes]  # offset in the file of a line's first byte, and the line without its newline

_FORWARD_BLOCK_BYTES = 1 << 20
_BACKWARD_BLOCK_BYTES = 1 << 16


def iter_records(path: Path, fault_of: Check | None = None, *, containing: bytes = b"") -> Iterator[Record]:
    """Yield the records of a JSON-lines file, oldest first; nothing if there is no file.

    Lines without the text `containing` are neither parsed nor checked: `b'"eval"'` finds the few evaluations in
    metrics.jsonl.
    """
    for offset, line in iter_lines(path):
        if containing in line:
            yield record_of_line(path, offset, line, fault_of)


def iter_lines(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a file with their offsets, oldest first; nothing without a file."""
    file = _open(path)
    if file is None:
        return
    with file:
        offset = 0
        unfinished: list[bytes] = []  # parts of a line whose newline has not been read yet
        while block := file.read(_FORWARD_BLOCK_BYTES):
            *whole_lines, rest = block.split(b"\n")
            for line in whole_lines:
                if unfinished:
                    line = b"".join([*unfinished, line])
                    unfinished = []
                yield offset, line
                offset += len(line) + 1
            unfinished.append(rest)


def lines_backwards(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a file with their offsets, newest first; nothing without a file."""
    file = _open(path)
    if file is None:
        return
    with file:
        position = file.seek(0, os.SEEK_END)
        later_parts: list[bytes] = []  # of the line whose first byte has not been read yet, the last part first
        has_newline = False  # what is behind the last newline of the file is no whole line
        while position > 0:
            block_begin = max(0, position - _BACKWARD_BLOCK_BYTES)
            file.seek(block_begin)
            block = file.read(position - block_begin)
            if len(block) < position - block_begin:
                return  # a resume has just cut the file
            position = block_begin
            first_part, *lines = block.split(b"\n")
            if not lines:
                later_parts.append(first_part)
                continue
            lines[-1] = b"".join([lines[-1], *reversed(later_parts)])
            later_parts = [first_part]
            offset = block_begin + len(first_part) + sum(len(line) + 1 for line in lines) + 1
            for line in reversed(lines):
                offset -= len(line) + 1
                if has_newline:
                    yield offset, line
                has_newline = True
        if has_newline:
            yield 0, b"".join(reversed(later_parts))


def newest_record(path: Path, fault_of: Check | None = None) -> Record | None:
    """Return the last whole record of a JSON-lines file; None if there is no record or no file."""
    for offset, line in lines_backwards(path):
        return record_of_line(path, offset, line, fault_of)
    return None


def record_of_line(path: Path, offset: int, line: bytes, fault_of: Check | None = None) -> Record:
    """Parse and check a line (without newline) that begins at byte `offset`; an error names its line number."""
    record = parse_record(line)
    if record is None:
        raise damaged_line(path, _num_lines_before(path, offset) + 1)
    fault = fault_of(record) if fault_of is not None else ""
    if fault:
        raise damaged_line(path, _num_lines_before(path, offset) + 1, fault)
    return record


def _open(path: Path) -> BinaryIO | None:
    with readable(path):
        try:
            return open_regular(path)
        except FileNotFoundError:
            return None


def _num_lines_before(path: Path, offset: int) -> int:
    num_newlines = 0
    with open_regular(path) as file:
        while offset > 0:
            block = file.read(min(offset, _FORWARD_BLOCK_BYTES))
            if not block:
                break
            num_newlines += block.count(b"\n")
            offset -= len(block)
    return num_newlines
