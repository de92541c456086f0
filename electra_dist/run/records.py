"""Append to and read files with one JSON object per line, the format of metrics.jsonl, ledger.jsonl and others.

Guarantee: a record is one `write` of one whole line, so a process that is killed leaves whole lines and at most one
torn line at the end, which is dropped when the file is next opened or read. A record that a full or silent disk
refuses stays in memory and is written before later records; a part of it that has reached the disk is first cut off.
Floats are written by `repr`, so reading returns them bit for bit. Every line is strict JSON: NaN and the infinities,
which JSON lacks, are written as the strings "NaN", "Infinity" and "-Infinity", and reading returns floats for them.

A file is read forwards or backwards, record by record, with one block and one line in memory, and it may grow
meanwhile. Each record is checked by the type that it was written with: whole numbers are not negative and have at most
53 bits, and a time can be converted to seconds. Fields that are not known pass, because a newer version of this
package may have written them.

Limits: one writer per file, unless all of them open it as `shared`. Lines that a reader does not ask for are not
checked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import (
    lock_file,
    make_folder,
    open_regular,
    readable,
    replacing,
    sync_folder,
    writable,
)
from electra_dist.store.json_file import DamagedJson, first_fault, parse_json_object

T = TypeVar("T")

_CLOSED = -1  # in place of a file descriptor
_UNOPENED = -2  # likewise: the next use opens the file
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_QUOTED_NON_FINITE = (b'"NaN"', b'Infinity"')  # a line without them has no such string
_FORWARD_BLOCK_BYTES = 1 << 20
_BACKWARD_BLOCK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 16 << 20  # of a record; a longer line would fill the memory


def _check_time(text: str) -> str:
    """Return an ISO 8601 time unchanged; raise ValueError for any other text, or a time that has no Unix time."""
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError:
        raise ValueError("the year is out of range") from None
    return text


Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Number = Annotated[float, Field(gt=-1e15, lt=1e15)]  # also refuses NaN and the infinities
Time = Annotated[str, AfterValidator(_check_time)]  # ISO 8601


class Record(BaseModel):
    """Base class of all records. Reading one fails for a value of a wrong type, and accepts unknown fields."""

    # A class is built at its first use, because a command reads few of the kinds that its imports define.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=(), defer_build=True)

    def fields(self) -> dict[str, Any]:
        """Return the record's fields that were set, by name, in the order in which a line of the file has them."""
        return self.model_dump(exclude_unset=True)


class DatedRecord(Record):
    """Record with the time at which it was written."""

    time: Time

    @property
    def unix_s(self) -> float:
        """Return the time in Unix seconds."""
        return datetime.fromisoformat(self.time).timestamp()


class Line(NamedTuple):
    """Complete line of a file, which ends with a line feed, and its place."""

    offset: int  # of its first byte in the file
    text: bytes  # without its newline


class JsonlFile:
    """JSON-lines file (one JSON object per line) that is open for appending, by one process at a time."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Open or create the file, and remove an unfinished last line.

        With `shared`, first wait until no other process has the file open with `shared`. If the file system has no
        locks, the unfinished line stays, because another process may be writing it now. Raises StoreAway if the disk
        refuses now but may recover, otherwise UserError.
        """
        self.path = path
        self._unwritten: list[bytes] = []  # lines that the disk has refused so far
        self._unsynced: list[bytes] = []  # lines written since the last sync, which a failed sync may lose
        self._valid_bytes: int | None = None  # after a failure: how much of the file is good; None without one
        with writable(path):
            make_folder(path.parent)
            self._file = self._open()
            try:
                is_alone = not shared or lock_file(self._file)
                sync_folder(path.parent)  # which may just have got the file; `sync` is about its bytes only
                if is_alone:
                    self._cut_torn_line()
            except BaseException:
                self.discard()
                raise

    def append(self, record: Record | Mapping[str, Any]) -> None:
        """Append a record as a line. It survives a kill of this process and, after `sync`, a crash of the machine.

        Raises StoreAway if the disk is full or away. The record is then kept in memory, and the next call of `append`,
        `flush` or `sync` that succeeds writes it. Do not append it again.
        """
        self._unwritten.append(encode(record))
        self.flush()

    def flush(self) -> None:
        """Write the records that the disk has refused so far, if any. Raises StoreAway if the disk refuses again.

        A file that `replace` has closed is opened again.
        """
        valid_bytes = self._valid_bytes
        try:
            if self._file == _UNOPENED:
                self._file = self._open()
            if not self._unwritten:
                return
            if valid_bytes is None:
                valid_bytes = os.fstat(self._file).st_size
            else:  # Cut off the rest of a failed write.
                os.ftruncate(self._file, valid_bytes)
            data = memoryview(b"".join(self._unwritten))
            while data:
                num_written = os.write(self._file, data)
                data = data[num_written:]
        except OSError:
            self._valid_bytes = valid_bytes
            if valid_bytes is not None:
                with contextlib.suppress(OSError):  # A read-only disk refuses this, too; the next write tries again.
                    os.ftruncate(self._file, valid_bytes)
            with writable(self.path):  # turns the error into a StoreError
                raise
        self._valid_bytes = None
        self._unsynced += self._unwritten
        self._unwritten = []

    def sync(self) -> None:
        """Wait until all records are on the disk (fsync, some milliseconds). Raises StoreAway as `append` does."""
        self.flush()
        with writable(self.path):
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

    def replace(self, records: Iterable[Record | Mapping[str, Any]]) -> None:
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
        self.flush()
        with writable(self.path):
            os.ftruncate(self._file, size_bytes)
        self.sync()

    def close(self) -> None:
        """Sync the file and close it; after StoreAway it stays open, and `close` may be called again."""
        if self._file != _CLOSED:
            self.sync()
            self.discard()

    def discard(self) -> None:
        """Close the file without the records that the disk has refused. Calling it twice is fine."""
        if self._file >= 0:
            os.close(self._file)
        self._file = _CLOSED

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _cut_torn_line(self) -> None:
        """Truncate the file after its last newline, which removes a line that a killed process left unfinished."""
        newest = next(lines(self.path, reverse=True), None)
        whole_lines_bytes = newest.offset + len(newest.text) + 1 if newest else 0
        if whole_lines_bytes != self.path.stat().st_size:
            os.truncate(self.path, whole_lines_bytes)


def append_record(path: Path, record: Record | Mapping[str, Any], *, shared: bool = False) -> None:
    """Append one record to a file; it is on the disk on return. After a failure, the call can be repeated."""
    file = JsonlFile(path, shared=shared)
    try:
        file.append(record)
        file.sync()
    finally:
        file.discard()  # releases the lock of a shared file, too


def encode(record: Record | Mapping[str, Any]) -> bytes:
    """Return a record as one line of strict JSON in ASCII, with its newline."""
    fields = record.fields() if isinstance(record, Record) else record
    text = json.dumps(_floats_to_strings(fields), separators=(", ", ": "), allow_nan=False)
    return text.encode("ascii") + b"\n"


def read_records(
    path: Path, parse: Callable[[dict[str, Any]], T], *, reverse: bool = False, containing: bytes = b""
) -> Iterator[T]:
    """Yield the records of a JSON-lines file, oldest first or in `reverse`; none if there is no file.

    `parse` makes a record of a line's JSON object, such as `LedgerEvent.model_validate`, and raises ValueError if it
    is damaged; UserError then names the line. Lines without the text `containing` are neither parsed nor checked:
    `b'"eval"'` finds the few evaluations in metrics.jsonl.
    """
    for line in lines(path, reverse=reverse):
        if containing in line.text:
            yield parse_line(path, line, parse)


def parse_line(path: Path, line: Line, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return the record in a line of the file `path`; if it is damaged, raise UserError with the line's number."""
    try:
        fields = parse_json_object(line.text)
    except DamagedJson:
        raise _damaged_line(path, line, "not a JSON object") from None
    if any(name in line.text for name in _QUOTED_NON_FINITE):
        fields = _strings_to_floats(fields)
    try:
        return parse(fields)
    except ValidationError as error:
        raise _damaged_line(path, line, first_fault(error)) from None
    except ValueError as error:
        raise _damaged_line(path, line, str(error)) from None


def lines(path: Path, *, reverse: bool = False) -> Iterator[Line]:
    """Yield the complete lines of a file, oldest first or in `reverse`, without an unfinished last one.

    If there is no file, nothing is yielded.
    """
    with readable(path):
        try:
            file = open_regular(path)
        except FileNotFoundError:
            return
    with file:
        yield from _lines_backwards(path, file) if reverse else _lines_forwards(path, file)


def _lines_forwards(path: Path, file: BinaryIO) -> Iterator[Line]:
    """Yield the lines of a file from the first to the last; what follows the last newline is left out."""
    offset = 0
    unfinished: list[bytes] = []  # parts of a line whose newline has not been read yet
    while block := file.read(_FORWARD_BLOCK_BYTES):
        *whole_lines, rest = block.split(b"\n")
        for line in whole_lines:
            if unfinished:
                line = b"".join([*unfinished, line])
                unfinished = []
            yield Line(offset, line)
            offset += len(line) + 1
        unfinished.append(rest)
        _check_length(path, unfinished)


def _lines_backwards(path: Path, file: BinaryIO) -> Iterator[Line]:
    """Yield the lines of a file from the last to the first; what follows the last newline is left out."""
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
        first_part, *whole_lines = block.split(b"\n")
        if not whole_lines:
            later_parts.append(first_part)
            _check_length(path, later_parts)
            continue
        whole_lines[-1] = b"".join([whole_lines[-1], *reversed(later_parts)])
        later_parts = [first_part]
        offset = block_begin + len(first_part) + sum(len(line) + 1 for line in whole_lines) + 1
        for line in reversed(whole_lines):
            offset -= len(line) + 1
            if has_newline:
                yield Line(offset, line)
            has_newline = True
    if has_newline:
        yield Line(0, b"".join(reversed(later_parts)))


def _check_length(path: Path, parts: Sequence[bytes]) -> None:
    """Raise UserError if a line, of which `parts` have been read, is longer than any record can be."""
    if sum(map(len, parts)) > _LONGEST_LINE_BYTES:
        raise UserError(
            f"{path}: a line of more than {_LONGEST_LINE_BYTES >> 20} MiB; the file is damaged: delete this line or "
            f"the file"
        )


def _damaged_line(path: Path, line: Line, fault: str) -> UserError:
    number = _num_lines_before(path, line.offset) + 1
    return UserError(f"{path}:{number}: {fault}; the file is damaged: delete this line or the file")


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
    """Reverse `_floats_to_strings`. A text that was equal to one of its strings becomes a float, too."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _strings_to_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strings_to_floats(item) for item in value]
    return value
