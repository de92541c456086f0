"""Append-only files of one JSON object a line: what the metrics and the ledger are written in.

Guarantees: a record is one `write` of one whole line, so a process that is killed leaves whole lines and at most one
torn one at the end, which is dropped when the file is next opened or read. Floats are written by `repr`, so what is
read back is bit for bit what was written. Every line is strict JSON: NaN and the infinities, which JSON lacks, are the
strings "NaN", "Infinity" and "-Infinity", and are floats again after `read_records`.

Cost: 5 us a record to encode; `sync` (fsync) is a disk round trip, some milliseconds, and belongs to checkpoints.

Where it stops: one writer per file. Two processes that append to the same file are not kept apart.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from electra_dist.errors import UserError
from electra_dist.store.files import replacing

Record = dict[str, Any]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlFile:
    """A file of records, opened for appending; a torn last line of an earlier process is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab")  # noqa: SIM115  (owned until close)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); mend run_dir or its permissions") from None
        self._cut_torn_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; after this it outlives the process, after `sync` also the machine."""
        self._file.write(encode(record))
        self._file.flush()

    def sync(self) -> None:
        """Return when all records are on the disk."""
        os.fsync(self._file.fileno())

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put `records` in place of all that was written: a reader sees the old file or the new one."""
        with replacing(self.path) as file:
            file.writelines(encode(record) for record in records)
        self._file.close()
        self._file = open(self.path, "ab")  # noqa: SIM115

    def close(self) -> None:
        """Sync and close. Calling it twice is fine."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _cut_torn_line(self) -> None:
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end != len(whole):
            os.truncate(self.path, end)


def encode(record: Mapping[str, Any]) -> bytes:
    """The line of a record, with its newline."""
    return json.dumps(_strict(record), separators=(", ", ": "), allow_nan=False).encode("ascii") + b"\n"


def read_records(path: Path) -> list[Record]:
    """All whole records of a file, oldest first; none when there is no such file.

    Raises:
        UserError: a whole line is no JSON object, so something other than a torn write has happened to the file.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):  # after the last newline: nothing or a torn line
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: not a JSON object; the file is damaged: delete this line or the file")
        records.append(_loose(record))
    return records


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def _loose(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _loose(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_loose(item) for item in value]
    return value
