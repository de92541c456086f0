"""Reading sentences and labels from TSV and JSONL, and turning them into ids.

Guarantee: a TSV is split at tabs and nothing else (GLUE has lone quotes), a byte order mark is dropped; a column is
named by the header, or numbered where there is none (CoLA). A label that the task does not know is one line with file
and line number. Lines with too few columns (QQP has some) are left out and counted, as the reference does.

Pairs that are too long lose the last token of the longer one until they fit, as in BERT.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_dist.errors import UserError
from electra_dist.model.rows import SpecialIds
from electra_dist.tokenizer import WordPieceTokenizer

Column = str | int


class Texts(NamedTuple):
    """The examples of one file."""

    a: list[str]
    b: list[str] | None
    label: list[str]
    line: list[int]  # where each is from, counted from 1
    skipped: int  # lines with too few columns
    file: Path
    sha256: str

    def sample(self, size: int) -> Texts:
        """`size` of the examples in their order, always the same ones; all where there are no more."""
        if size >= len(self.a):
            return self
        rows = np.sort(np.random.default_rng(0).permutation(len(self.a))[:size]).tolist()
        return self._replace(
            a=[self.a[row] for row in rows],
            b=None if self.b is None else [self.b[row] for row in rows],
            label=[self.label[row] for row in rows],
            line=[self.line[row] for row in rows],
        )


def find_file(places: Sequence[Path]) -> Path:
    """The first of `places` that is there.

    Raises:
        UserError: none is; names all.
    """
    for place in places:
        if place.is_file():
            return place
    others = f" (nor {', '.join(map(str, places[1:]))})" if places[1:] else ""
    raise UserError(f"{places[0]}: no such file{others}; name its folder by --data")


def read_texts(file: Path, text_a: Column, text_b: Column | None, label: Column) -> Texts:
    """The columns of a .tsv or .jsonl file.

    Raises:
        UserError: a column is missing, or the file is not what its name says.
    """
    raw = file.read_bytes()
    try:
        lines = raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start}); convert it") from None
    columns = [text_a, label] if text_b is None else [text_a, text_b, label]
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    rows = _jsonl_rows(file, numbered, columns) if file.suffix == ".jsonl" else _tsv_rows(file, numbered, columns)
    kept = [(number, row) for number, row in rows if row is not None]
    if not kept:
        raise UserError(f"{file}: no examples; give a file with lines")
    return Texts(
        a=[row[0] for _, row in kept],
        b=None if text_b is None else [row[1] for _, row in kept],
        label=[row[-1].strip() for _, row in kept],
        line=[number for number, _ in kept],
        skipped=len(rows) - len(kept),
        file=file,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def encode_texts(
    a: Sequence[str], b: Sequence[str] | None, tokenizer: WordPieceTokenizer, special: SpecialIds, max_length: int
) -> list[list[int]]:
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]` of each example, at most `max_length` ids."""
    ids_a = tokenizer.encode(a)
    if b is None:
        return [[special.cls, *ids[: max_length - 2], special.sep] for ids in ids_a]
    rows = []
    for first, second in zip(ids_a, tokenizer.encode(b), strict=True):
        first, second = truncate_pair(first, second, max_length - 3)
        row = [special.cls, *first, special.sep]
        rows.append([*row, *second, special.sep] if second else row)
    return rows


def truncate_pair(first: list[int], second: list[int], max_total: int) -> tuple[list[int], list[int]]:
    """Both, cut so that together they have at most `max_total` ids; of two equally long ones the second is cut."""
    keep_a, keep_b = len(first), len(second)
    while keep_a + keep_b > max_total:
        if keep_a > keep_b:
            keep_a -= 1
        else:
            keep_b -= 1
    return first[:keep_a], second[:keep_b]


Row = tuple[int, list[str] | None]  # line number, its columns or None where there are too few


def _tsv_rows(file: Path, lines: Sequence[tuple[int, str]], columns: Sequence[Column]) -> list[Row]:
    places = [column for column in columns if isinstance(column, int)]
    if not places:
        header = [name.strip() for name in lines[0][1].split("\t")] if lines else []
        missing = [column for column in columns if column not in header]
        if missing:
            raise UserError(f"{file}: no column `{missing[0]}`; the header has {', '.join(header)}")
        places, lines = [header.index(str(column)) for column in columns], lines[1:]
    rows: list[Row] = []
    for number, line in lines:
        cells = line.split("\t")
        rows.append((number, [cells[place] for place in places] if len(cells) > max(places) else None))
    return rows


def _jsonl_rows(file: Path, lines: Sequence[tuple[int, str]], columns: Sequence[Column]) -> list[Row]:
    rows: list[Row] = []
    for number, line in lines:
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{file}:{number}: not a JSON object; one object a line is expected")
        missing = [column for column in columns if column not in record]
        if missing:
            raise UserError(f"{file}:{number}: no key `{missing[0]}`; it has {', '.join(record)}")
        rows.append((number, [str(record[str(column)]) for column in columns]))
    return rows
