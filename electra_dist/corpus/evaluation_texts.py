"""Read the texts of evaluation files, such as BLiMP's or GLUE's, to look for them in the text of a pretraining.

Guarantee: no column has to be named: each text of a table or of a JSON file counts, in whatever column or depth it
stands, and so does each line of a .txt file. Equal texts count once, at their first place.

Limits: texts with few words, as labels and names have, are left out and counted, because they occur anywhere by
chance. A text that contains a tab or a line break is two texts in a .tsv or .txt file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular, readable
from electra_dist.tables import SAVED_STATE, TABLE_SUFFIXES, NotText, as_text, read_table

_SUFFIXES = (*TABLE_SUFFIXES, ".txt", ".json")
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell of a .tsv file, as programs write texts that contain quotes


class EvaluationText(NamedTuple):
    """One text of an evaluation file, such as a sentence of BLiMP, and where it stands."""

    file: Path
    place: str  # FILE:LINE, or the file of a .json file
    text: str


class EvaluationTexts(NamedTuple):
    """Different texts of some evaluation files that have a given number of words, and how many are shorter."""

    texts: list[EvaluationText]
    num_short: int  # different texts that are left out, because they have too few words


def read_evaluation_texts(paths: Sequence[Path], least_words: int, key: str) -> EvaluationTexts:
    """Return the different texts with at least `least_words` words in files, and in the files of folders.

    Words are what white space separates. Raises UserError, which names the option or config key `key`, if a file is
    missing, cannot be read or has no such text.
    """
    seen: set[str] = set()
    texts = []
    for file in _files(paths, key):
        for place, text in _texts_of_file(file):
            if text in seen:
                continue
            seen.add(text)
            if len(text.split()) >= least_words:
                texts.append(EvaluationText(file, place, text))
    if not texts:
        raise UserError(
            f"{key}: none of the {len(seen)} texts in {paths[0]} has {least_words} words; lower the least number of "
            f"words, or name other files"
        )
    return EvaluationTexts(texts, len(seen) - len(texts))


def _files(paths: Sequence[Path], key: str) -> Iterator[Path]:
    """Yield the given files and, for each given folder, its files of known endings, sorted by name.

    Raises UserError, which names the option or key `key`, if a path is missing or a folder has no such file.
    """
    for path in paths:
        if path.is_dir() and not (path / SAVED_STATE).exists():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
            if not files:
                raise UserError(f"{key}: {path}: holds no {', '.join(_SUFFIXES)} file; name another folder")
            yield from files
        elif path.exists():
            yield path
        else:
            raise UserError(f"{key}: there is no file {path}; correct the path")


def _texts_of_file(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) for each text of a file; the texts are stripped of white space, and empty ones left out."""
    is_tsv = file.suffix.lower() == ".tsv"
    for place, value in _values_of_file(file):
        for text in _texts_in(value):
            if is_tsv and _QUOTED.fullmatch(text):
                text = text[1:-1].replace('""', '"')
            try:
                stripped = as_text(text).strip()
            except NotText as error:
                raise UserError(
                    f"{place}: the text {text!r} {error}; write the whole character, or remove it"
                ) from None
            if stripped:
                yield place, stripped


def _values_of_file(file: Path) -> list[tuple[str, object]]:
    """Return (place, value) for the whole of a JSON file, or for each line of a table."""
    suffix = file.suffix.lower()
    if suffix != ".json":
        table = read_table(file, has_header=False)
        header = table.columns if suffix == ".csv" else []  # its first line, which may be no header
        return [(f"{file}:1", header), *((line.place, line.record) for _, line in table.lines())]
    with readable(file):
        data = read_regular(file, MOST_DATA_BYTES)
    try:
        return [(str(file), json.loads(data))]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); copy it again, or call JSON lines .jsonl") from None


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)
