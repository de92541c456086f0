"""Decode the bytes of a document to text, or skip the document for one of a fixed list of reasons.

Guarantee: every document becomes text, or raises `SkippedDocument` with one reason (a key of `SKIPPED_KINDS`); nothing
is guessed, and bytes that are not UTF-8 are replaced only if the caller asks for it. The text can be encoded as UTF-8:
it contains no half of a surrogate pair.

This module imports nothing heavy; `text_readers.py` reads the bytes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Undecodable = Literal["skip", "replace"]  # values of corpus.undecodable

# Kind of skipped document -> explanation for the user. corpus.json counts the kinds under these keys.
SKIPPED_KINDS = {
    "undecodable": "bytes that are not UTF-8",
    "broken_json": "a line that is not a JSON object",
    "no_text": "no text field, or its value is not a string",
    "empty": "nothing but white space",
    "no_tokens": "text of which the tokenizer keeps nothing",
}
DOCUMENT_BYTES = 64  # added to the size of every document, so that many empty ones fill a spill file or a chunk, too
_MOST_FIELDS = 20  # fields of a record that are named
_MOST_NESTED = 4  # objects within one another in which fields are looked for
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTES_OF_ESCAPE = 6  # of half a surrogate pair in JSON, such as \ud83d


@dataclass(slots=True)
class RawDocument:
    """One document as undecoded bytes (plain text or a JSON line), with its places in the inputs and in the corpus."""

    data: bytes | None  # None where a parquet cell is null, or where a row of a CSV file has too few or many cells
    is_json: bool  # whether `data` is a JSON line, whose text is one of its fields
    id: str | None = None  # id from a table's column `id`; None for other formats (a JSON line has its id in `data`)
    fields: dict[str, Any] | None = None  # other cells of a table's row, by column; None unless asked for
    file: int = 0  # position of its file among the inputs
    number: int = 0  # position in its file
    key: int = 0  # place in the order of the corpus (`shuffle.py`)

    @property
    def size(self) -> int:
        """Return the bytes of the undecoded document; 0 if it has no text at all."""
        return len(self.data or b"")

    @property
    def place(self) -> tuple[int, int, int]:
        """Return the sort key of the documents of a corpus: shuffle key, then file and number."""
        return self.key, self.file, self.number


class SkippedDocument(Exception):
    """Exception for a document that is left out of the corpus for a reason; the caller counts it and goes on."""

    def __init__(self, kind: str, undecodable_bytes: int = 0, other_fields: Sequence[str] = ()) -> None:
        """Take the reason, a key of `SKIPPED_KINDS`; if it is "undecodable", also how many bytes are not UTF-8.

        `other_fields` names the fields with text of a record that has none in the field of the text.
        """
        assert kind in SKIPPED_KINDS
        super().__init__(kind)
        self.kind = kind
        self.undecodable_bytes = undecodable_bytes
        self.other_fields = other_fields


class DocumentNames(NamedTuple):
    """Id and source of a document as its own record, a JSON line or table row, states them."""

    id: str | None = None  # field `id` of a JSON line, or cell of a table's column `id`; None if there is none
    source: str | None = None  # field `metadata.source` of a JSON line, which `corpus prepare` writes; None without it


class DecodedText(NamedTuple):
    """Text of a document, how many of its bytes were wrong, and the id and source that its record states."""

    text: str
    replaced_bytes: int  # bytes, each replaced alone or with its neighbours by U+FFFD; 0 for a clean document
    names: DocumentNames


def decode(document: RawDocument, text_field: str = "text", undecodable: Undecodable = "skip") -> str:
    """Return the text of a document, as `decode_counted` does; raise SkippedDocument if it has none."""
    return decode_counted(document, text_field, undecodable).text


def decode_counted(document: RawDocument, text_field: str, undecodable: Undecodable) -> DecodedText:
    """Decode a document to text without a byte order mark; raise SkippedDocument if it has no usable text.

    `text_field` names the field of a JSON line that holds the text; "data.text" is the field `text` within `data`.
    `undecodable` says what to do about bytes that are not UTF-8 and half surrogate pairs in JSON: "skip" leaves the
    document out, "replace" puts U+FFFD there, which WordPiece drops. Half a pair counts as the six bytes of its
    escape. A text without any token is not noticed here.
    """
    if document.data is None:
        raise SkippedDocument("no_text")
    content, num_undecodable = _decode_bytes(document.data)
    if num_undecodable and undecodable == "skip":
        raise SkippedDocument("undecodable", num_undecodable)
    if not content.strip():
        raise SkippedDocument("empty")
    if not document.is_json:
        return DecodedText(content, num_undecodable, DocumentNames(document.id))

    record = _parse_record(content)
    text = _text_of_record(record, text_field)
    num_halves = _num_half_pairs(text)
    if num_halves:
        num_undecodable += num_halves * _BYTES_OF_ESCAPE
        if undecodable == "skip":
            raise SkippedDocument("undecodable", num_undecodable)
        text = _SURROGATE.sub("\ufffd", text)
    return DecodedText(text, num_undecodable, _names_of_record(record))


def _decode_bytes(data: bytes) -> tuple[str, int]:
    """Return the text of UTF-8 bytes, with U+FFFD for bytes that are not UTF-8, and the number of these bytes."""
    try:
        return data.decode("utf-8-sig"), 0
    except UnicodeDecodeError:
        # "surrogateescape" makes one lone surrogate of each such byte, and valid UTF-8 holds no surrogate.
        num_undecodable = _num_half_pairs(data.decode("utf-8", "surrogateescape"))
        return data.decode("utf-8-sig", "replace"), num_undecodable


def _num_half_pairs(text: str) -> int:
    """Count the unpaired surrogates of a text; Python stores a whole surrogate pair as one ordinary character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return len(_SURROGATE.findall(text))
    return 0


def _parse_record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise SkippedDocument("broken_json") from None
    if not isinstance(record, dict):
        raise SkippedDocument("broken_json")
    return record


def _text_of_record(record: dict[str, Any], text_field: str) -> str:
    text = _value_at(record, text_field)
    if not isinstance(text, str):
        raise SkippedDocument("no_text", other_fields=list(itertools.islice(_fields_with_text(record), _MOST_FIELDS)))
    if not text.strip():
        raise SkippedDocument("empty")
    return text


def path_of_field(field: str, names: Container[str]) -> list[str]:
    """Split a field such as "a.b" into the path ["a", "b"], or return ["a.b"] if the record has that name."""
    return [field] if field in names else field.split(".")


def _value_at(record: dict[str, Any], field: str) -> Any:
    value: Any = record
    for name in path_of_field(field, record):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _fields_with_text(record: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the names of a record's fields that hold text, with dots for nested ones, such as data.text.

    Records are searched five levels deep. `prefix`, with a dot at its end, and `depth` are those of a nested record.
    """
    for name, value in record.items():
        if isinstance(value, str) and value.strip():
            yield name_of_value(prefix + name) or ""
        elif isinstance(value, dict) and depth < _MOST_NESTED:
            yield from _fields_with_text(value, f"{prefix}{name}.", depth + 1)


def _names_of_record(record: dict[str, Any]) -> DocumentNames:
    """Return the fields `id` and `metadata.source` of a JSON record; None for a field that is no string or integer."""
    metadata = record.get("metadata")
    source = metadata.get("source") if isinstance(metadata, dict) else None
    return DocumentNames(name_of_value(record.get("id")), name_of_value(source))


def name_of_value(value: object) -> str | None:
    """Convert a string or an integer to text that can be encoded as UTF-8; None for other types, such as bool.

    Half of a surrogate pair, which UTF-8 cannot encode, becomes U+FFFD.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return _SURROGATE.sub("\ufffd", str(value))
