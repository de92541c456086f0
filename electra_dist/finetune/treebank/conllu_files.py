"""Read sentences of a treebank from CoNLL-U files: words with their parts of speech and heads.

Guarantee: words are the syntactic words of the tree; lines of multiword tokens (ID 1-2) and of empty nodes (ID 5.1)
are left out, as the format prescribes. Every other line that does not fit the format is an error with its number, and
so is a sentence that has underscores in place of its words.

Source: https://universaldependencies.org/format.html
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_dist.errors import UserError
from electra_dist.finetune.input_files import split_lines
from electra_dist.store.regular_files import MOST_DATA_BYTES, read_regular

_NUM_COLUMNS = 10
_ID, _FORM, _UPOS, _HEAD = 0, 1, 3, 6  # indices of columns


class Sentence(NamedTuple):
    """Words of a sentence, with the part of speech and the syntactic head of each word."""

    words: tuple[str, ...]
    tags: tuple[str, ...]  # UPOS of each word, such as "NOUN"
    heads: tuple[int, ...]  # number of each word's head, from 1; 0 for the root


class Treebank(NamedTuple):
    """Sentences of a training and a test file, and a digest of the bytes of both."""

    train: list[Sentence]
    test: list[Sentence]
    sha256: str

    def sample(self, max_train: int | None) -> Treebank:
        """Return the treebank with a fixed random sample of at most `max_train` training sentences; None keeps all."""
        if max_train is None or max_train >= len(self.train):
            return self
        order = np.random.default_rng(seed=0).permutation(len(self.train))
        return self._replace(train=[self.train[index] for index in np.sort(order[:max_train])])


def read_treebank(folder: Path) -> Treebank:
    """Read a folder's only file train.conllu or *-train.conllu, and its only file test.conllu or *-test.conllu."""
    files = [_only_file(folder, "train"), _only_file(folder, "test")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(read_regular(file, MOST_DATA_BYTES))
    train, test = (read_conllu(file) for file in files)
    return Treebank(train=train, test=test, sha256=digest.hexdigest())


def read_conllu(file: Path) -> list[Sentence]:
    """Return the sentences of a CoNLL-U file; raise UserError if it has none, or if a line does not fit the format."""
    sentences = []
    for first_line, columns_of_words in _blocks(file, split_lines(read_regular(file, MOST_DATA_BYTES), file)):
        num_words = len(columns_of_words)
        heads = []
        for number, columns in enumerate(columns_of_words, start=1):
            head = columns[_HEAD]
            is_head = head.isdecimal() and int(head) <= num_words and int(head) != number
            is_empty = not columns[_FORM] or columns[_UPOS] in ("", "_")
            if not is_head or columns[_ID] != str(number) or is_empty:
                raise UserError(
                    f"{file}: sentence at line {first_line}: word {number} has ID {columns[_ID]}, UPOS "
                    f"{columns[_UPOS]} and HEAD {head}; IDs must count from 1, FORM and UPOS must not be empty, and "
                    f"HEAD must be another word or 0, up to {num_words}: correct the file"
                )
            heads.append(int(head))
        words = tuple(columns[_FORM] for columns in columns_of_words)
        tags = tuple(columns[_UPOS] for columns in columns_of_words)
        check_words(words, f"{file}: sentence at line {first_line}")
        sentences.append(Sentence(words=words, tags=tags, heads=tuple(heads)))
    if not sentences:
        raise UserError(f"{file}: no sentences; name a treebank in CoNLL-U format")
    return sentences


def check_words(words: Sequence[str], place: str) -> None:
    """Raise UserError if all words of a sentence are underscores, as in treebanks published without their text.

    A sentence with a single underscore is accepted: the text itself may have one there. `place` (file and line) begins
    the message.
    """
    if len(words) > 1 and not "".join(words).strip("_"):
        raise UserError(
            f"{place}: all {len(words)} words are underscores, as in a treebank that is published without its text; "
            f"add the words from its source, which its README names"
        )


def _blocks(file: Path, lines: list[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield for each sentence the line number (from 1) of its first word, and the columns of each syntactic word."""
    words: list[list[str]] = []
    first_line = 0
    for number, line in enumerate([*lines, ""], start=1):
        if line.startswith("#"):
            continue
        if not line.strip(" \t"):
            if words:
                yield first_line, words
            words = []
            continue
        columns = line.split("\t")
        if len(columns) != _NUM_COLUMNS:
            raise UserError(
                f"{file}:{number}: {len(columns)} columns in place of {_NUM_COLUMNS}; CoNLL-U separates them by tabs"
            )
        is_syntactic_word = "-" not in columns[_ID] and "." not in columns[_ID]
        if is_syntactic_word:
            if not words:
                first_line = number
            words.append(columns)


def _only_file(folder: Path, split: str) -> Path:
    files = sorted(folder.glob(f"*-{split}.conllu")) + sorted(folder.glob(f"{split}.conllu"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise UserError(
            f"{folder}: one file {split}.conllu or *-{split}.conllu is needed, but the folder has {found}; "
            f"name the folder of one treebank"
        )
    return files[0]
