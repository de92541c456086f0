"""Read what the files of fine-tuning data have in common: lines of UTF-8, JSON objects, and the text within these.

Guarantee: a JSON value becomes a text, a label or an id only if it is text, or for labels and ids a number. Values of
other types (null, booleans, lists, objects, NaN) are refused, and so is half of a surrogate pair, which no tokenizer
takes: none of them becomes a word such as "None".
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from electra_dist.errors import UserError
from electra_dist.store.json_file import DamagedJson, parse_json_object

_LINE_END = re.compile(r"(?<!\r)\r*\n|\r")  # a search begins at the first of several \r, so that it stays linear
_MAX_SHOWN_CHARS = 40  # of a value in an error message


class NotText(ValueError):
    """Error: a JSON value is not text; the message describes the value."""


class JsonLine(NamedTuple):
    """JSON object in one line of a file; every error about its values names the file and the line."""

    place: str  # FILE:LINE
    record: dict[str, Any]

    def text(self, key: str) -> str:
        """Return the text under `key`; raise UserError if the value is not text."""
        try:
            return as_text(self.record[key])
        except NotText as error:
            raise UserError(
                f"{self.place}: the value of `{key}` is no text, but {error}; write a text in quotes, or remove the "
                f"line"
            ) from None

    def name(self, key: str) -> str:
        """Return the label or id under `key` as text; raise UserError if the value is neither text nor a number."""
        try:
            return as_name(self.record[key])
        except NotText as error:
            raise UserError(
                f"{self.place}: the value of `{key}` is neither text nor a number, but {error}; write a text in "
                f"quotes or a number, or remove the line"
            ) from None


def split_lines(data: bytes, file: Path) -> list[str]:
    """Return the lines of a UTF-8 file, without line ends and byte order mark; `data` is the content of `file`.

    A line ends at a line feed, a carriage return, or both together, as when Python opens a text file. Other
    separators, such as U+2028, end no line. Raises UserError, which names `file`, if `data` is not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start}); convert the file to UTF-8") from None
    return _LINE_END.split(text)


def parse_json_line(file: Path, number: int, line: str) -> JsonLine:
    """Parse one line of a file as a JSON object; raise UserError, which names file and line `number`, if it is not."""
    try:
        return JsonLine(f"{file}:{number}", parse_json_object(line))
    except DamagedJson as error:
        raise UserError(f"{file}:{number}: not a JSON object ({error}); write one object per line") from None


def as_text(value: object) -> str:
    """Return a JSON value if it is text; raise NotText if it has another type or contains half of a surrogate pair."""
    if not isinstance(value, str):
        shown = json.dumps(value)
        raise NotText(shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}...")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ord(value[error.start])
        raise NotText(f"has half of a surrogate pair, \\u{half:04x}, at character {error.start}") from None
    return value


def as_name(value: object) -> str:
    """Convert a JSON value to a label or an id: text stays as it is, and a finite number is written as Python does.

    Raises NotText for any other value.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return str(value) if is_number else as_text(value)
