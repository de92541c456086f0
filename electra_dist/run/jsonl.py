"""Append to and read files with one JSON object per line, the format of metrics.jsonl, ledger.jsonl and others.

Guarantee: a record is one `write` of one whole line, so a process that is killed leaves whole lines and at most one
torn line at the end, which is dropped when the file is next opened or read. A record that a full or silent disk
refuses stays in memory and is written before later records; a part of it that has reached the disk is first cut off.
Floats are written by `repr`, so reading returns them bit for bit. Every line is strict JSON: NaN and the infinities,
which JSON lacks, are written as the strings "NaN", "Infinity" and "-Infinity", and `read_records` returns floats for
them.

Limits: one writer per file. Nothing keeps two processes that append to the same file apart.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import make_folder, readable, replacing, store_error, sync_folder, writable
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.json_file import DamagedJson, parse_json_object
from electra_dist.store.regular_files import read_regular

Record = dict[str, Any]

_CLOSED = -1  # in place of a file descriptor
_UNOPENED = -2  # likewise: the next use opens the file
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_QUOTED_NON_FINITE = (b'"NaN"', b'Infinity"')  # a line without them has no such string
_BLOCK_BYTES = 1 << 16  # read together where the last newline is looked for


class JsonlFile:
    """JSON-lines file (one JSON object per line) that is open for appending, by one process only (not checked)."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and remove a torn last line; raise StoreAway if waiting may help, else UserError."""
        self.path = path
        self._unwritten: list[bytes] = []  # lines that the disk has refused so far
        self._unsynced: list[bytes] = []  # lines written since the last sync, which a failed sync may lose
        self._valid_bytes: int | None = None  # after a failure: how much of the file is good; None without one
        try:
            make_folder(path.parent)
            self._file = self._open()
            sync_folder(path.parent)  # which may just have got the file; `sync` is about its bytes only
            self._cut_torn_line()
        except OSError as error:
            if is_worth_waiting_for(error):
                raise store_error(path, error) from None
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); set another run_dir, or fix its permissions"
            ) from None

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record as a line. It survives a kill of this process and, after `sync`, a crash of the machine.

        Raises StoreAway if the disk is full or away. The record then stays in memory: do not append it again, because
        the next `append`, `flush` or `sync` that succeeds writes it.
        """
        self._unwritten.append(encode(record))
        self.flush()

    def flush(self) -> None:
        """Write the records that the disk has refused so far, if any. Raises StoreAway if the disk refuses again."""
        if not self._unwritten:
            return
        with self._opened():
            self._write_lines()

    def sync(self) -> None:
        """Wait until all records are on the disk (fsync, some milliseconds). Raises StoreAway as `append` does."""
        self.flush()
        with self._opened():
            try:
                os.fsync(self._file)
            except OSError:
                # The kernel may have dropped what it could not write, and reports that only once.
                unsynced_bytes = sum(map(len, self._unsynced))
                self._valid_bytes = max(0, os.fstat(self._file).st_size - unsynced_bytes)
                self._unwritten = [*self._unsynced, *self._unwritten]
                self._unsynced = []
                raise
        self._unsynced = []

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole content of the file atomically: a reader sees the old records or the new ones."""
        with replacing(self.path) as file:
            file.writelines(encode(record) for record in records)
        self.discard()
        self._file = _UNOPENED
        self._unwritten = []
        self._unsynced = []
        self._valid_bytes = None

    def cut(self, size_bytes: int) -> None:
        """Remove everything behind the first `size_bytes` bytes, which must end with a whole line."""
        with self._opened():
            os.ftruncate(self._file, size_bytes)
        self.sync()

    def close(self) -> None:
        """Sync the file and close it; after StoreAway it stays open, and a later call tries again."""
        if self._file != _CLOSED:
            self.sync()
            self.discard()

    def discard(self) -> None:
        """Close the file without the records that the disk has refused. Calling it twice is fine."""
        if self._file >= 0:
            os.close(self._file)
        self._file = _CLOSED

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Open the file anew after `replace`, and turn an OSError of the block into a StoreError."""
        with writable(self.path):
            if self._file == _UNOPENED:
                self._file = self._open()
            yield

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _write_lines(self) -> None:
        """Cut off the rest of a failed write, then write the lines that the disk has refused so far."""
        if self._valid_bytes is not None:
            os.ftruncate(self._file, self._valid_bytes)
            self._valid_bytes = None
        size_bytes = os.fstat(self._file).st_size
        data = memoryview(b"".join(self._unwritten))
        try:
            while data:
                num_written = os.write(self._file, data)
                data = data[num_written:]
        except OSError:
            self._valid_bytes = size_bytes
            with contextlib.suppress(OSError):  # A read-only disk refuses this, too; the next write tries again.
                os.ftruncate(self._file, size_bytes)
            raise
        self._unsynced += self._unwritten
        self._unwritten = []

    def _cut_torn_line(self) -> None:
        """Truncate the file after its last newline, which removes a line that a killed process left unfinished."""
        with open(self.path, "rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            whole_lines_bytes = size_bytes
            while whole_lines_bytes > 0:
                begin = max(0, whole_lines_bytes - _BLOCK_BYTES)
                file.seek(begin)
                last_newline = file.read(whole_lines_bytes - begin).rfind(b"\n")
                whole_lines_bytes = begin + last_newline + 1  # `begin` if the block has no newline
                if last_newline >= 0:
                    break
        if whole_lines_bytes != size_bytes:
            os.truncate(self.path, whole_lines_bytes)


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as one line of strict JSON in ASCII, with its newline."""
    text = json.dumps(_floats_to_strings(record), separators=(", ", ": "), allow_nan=False)
    return text.encode("ascii") + b"\n"


def read_records(path: Path, fault_of: Callable[[Record], str] | None = None) -> list[Record]:
    """Return all whole records of a JSON-lines file, oldest first, without a torn last line; [] without a file.

    `fault_of` returns what is wrong with a record, "" for a good one. If a record has a fault, or a line is no JSON
    object, UserError names the line.
    """
    with readable(path):
        try:
            content = read_regular(path)
        except FileNotFoundError:
            return []
    records = []
    *lines, _ = content.split(b"\n")  # after the last newline comes nothing, or a torn line
    for number, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is None:
            raise damaged_line(path, number)
        fault = fault_of(record) if fault_of is not None else ""
        if fault:
            raise damaged_line(path, number, fault)
        records.append(record)
    return records


def parse_record(line: bytes) -> Record | None:
    """Return the record in a line, with "NaN" and the infinities as floats; None if it is no JSON object."""
    record = _parse_object(line)
    if record is None or not any(name in line for name in _QUOTED_NON_FINITE):
        return record
    converted: Record = _strings_to_floats(record)
    return converted


def damaged_line(path: Path, number: int, fault: str = "not a JSON object") -> UserError:
    """Return the error for a damaged line of a file; its message names the file, the line's number and the fault."""
    return UserError(f"{path}:{number}: {fault}; the file is damaged: delete this line or the file")


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        return parse_json_object(line)
    except DamagedJson:
        return None


def _floats_to_strings(value: Any) -> Any:
    """Replace NaN and the infinities by strings at every depth of a JSON tree of dicts and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _floats_to_strings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_floats_to_strings(item) for item in value]
    return value


def _strings_to_floats(value: Any) -> Any:
    """Reverse `_floats_to_strings`; a text that happens to be one of these strings becomes a float, too."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _strings_to_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strings_to_floats(item) for item in value]
    return value
