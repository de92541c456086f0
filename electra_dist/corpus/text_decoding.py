"""Decode the bytes of a document to text, or skip the document for one of a fixed list of reasons.

Guarantee: every document becomes text, or raises `SkippedDocument` with one reason (a key of `SKIPPED_KINDS`); nothing
is repaired or guessed. The text can be encoded as UTF-8: it contains no half of a surrogate pair.

Cost: 200 MB/s for JSON lines, 1 GB/s for plain text. This module imports nothing heavy; `text_readers.py` reads the
bytes.
"""

from __future__ import annotations

import json
from typing import NamedTuple

# Kind of skipped document -> explanation for the user. corpus.json counts the kinds under these keys.
SKIPPED_KINDS = {
    "undecodable": "bytes that are not UTF-8",
    "broken_json": "a line that is not a JSON object",
    "no_text": "no text field, or its value is not a string",
    "empty": "nothing but white space",
    "no_tokens": "text of which the tokenizer keeps nothing",
}


class RawDocument(NamedTuple):
    """One document as undecoded bytes: a JSON line, or plain text; the bytes are None where a parquet cell is null."""

    data: bytes | None  # None where a parquet cell is null
    is_json: bool  # whether `data` is a JSON line, whose text is one of its fields


class SkippedDocument(Exception):
    """Exception for a document that is left out of the corpus; `kind`, a key of `SKIPPED_KINDS`, is the reason.

    It is not an error of the corpus build: the caller counts the document under its kind and continues.
    """

    def __init__(self, kind: str) -> None:
        """Store the reason for which the document is left out.

        Args:
            kind: a key of `SKIPPED_KINDS`, such as "empty".

        Raises:
            AssertionError: `kind` is not one of these keys.
        """
        assert kind in SKIPPED_KINDS
        super().__init__(kind)
        self.kind = kind


def decode(document: RawDocument, text_field: str = "text") -> str:
    """Return the text of a document; a byte order mark at its start is removed.

    Args:
        document: the bytes, as a reader yields them.
        text_field: field of a JSON line that holds the text; ignored for plain text.

    Raises:
        SkippedDocument: the document has no usable text; its `kind` is the reason. The kind "no_tokens" is not raised
            by this function, because only the tokenizer can find it.
    """
    if document.data is None:
        raise SkippedDocument("no_text")
    try:
        text = document.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SkippedDocument("undecodable") from None
    if not text.strip():
        raise SkippedDocument("empty")
    if document.is_json:
        text = _text_of_json(text, text_field)
    return text


def _text_of_json(line: str, text_field: str) -> str:
    """Return the field `text_field` of a JSON line, which must be a string that can be encoded as UTF-8.

    Raises:
        SkippedDocument: the line is not a JSON object, the field is missing, not a string or white space, or the
            string holds half of a surrogate pair.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise SkippedDocument("broken_json") from None
    if not isinstance(record, dict):
        raise SkippedDocument("broken_json")
    text = record.get(text_field)
    if not isinstance(text, str):
        raise SkippedDocument("no_text")
    if not text.strip():
        raise SkippedDocument("empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may hold half of a surrogate pair, written as \ud83d
        raise SkippedDocument("undecodable") from None
    return text
