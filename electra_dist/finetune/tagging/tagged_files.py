"""Reads sentences of tagged words from CoNLL-U files or from files with columns, as CoNLL-2003 has them.

Guarantee: every line belongs to a sentence or separates two; a line that fits neither is an error with its number.

How: the suffix decides the format. In `.conllu`, the tag of a word is its universal part of speech. In all others, a
line has the word in its first and the tag in its last column, separated by tabs, or by spaces if it has no tab. An
empty line ends a sentence. Lines that begin with -DOCSTART- separate documents and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.errors import UserError
from electra_dist.finetune.treebank.conllu_files import read_conllu
from electra_dist.store.regular_files import MOST_DATA_BYTES, read_regular

_COLUMN_SUFFIXES = (".txt", ".conll", ".tsv", ".bio", ".iob2")
_NAMES_OF_SPLIT = {"train": ("train",), "dev": ("dev", "valid", "validation", "testa")}
_MIN_COLUMNS = 2  # word and tag


class TaggedSentence(NamedTuple):
    """Words of a sentence and the tag of each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def find_tagged_file(folder: Path, split: str) -> Path:
    """Return the file of a folder with the sentences of "train" or "dev".

    The name is train, or for "dev" one of dev, valid, validation and testa, with one of the suffixes .conllu, .txt,
    .conll, .tsv, .bio and .iob2. Names of treebank files, *-train.conllu and *-dev.conllu, are found, too.

    Raises:
        UserError: there is no such file, or more than one.
    """
    suffixes = (".conllu", *_COLUMN_SUFFIXES)
    files = [folder / f"{name}{suffix}" for name in _NAMES_OF_SPLIT[split] for suffix in suffixes]
    found = [file for file in files if file.is_file()] + sorted(folder.glob(f"*-{split}.conllu"))
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{folder}: {' and '.join(file.name for file in found)} are both {split} files; keep one of them"
        )
    raise UserError(
        f"{folder}: no {split} file; put {split}.conllu, or {split}.txt with a word and its tag on each line, there "
        f"(--data)"
    )


def read_tagged_file(file: Path) -> list[TaggedSentence]:
    """Return the sentences of a file in CoNLL-U or in columns, decided by its suffix.

    Raises:
        UserError: the file is not UTF-8, has no sentence, or has a line that does not fit the format.
    """
    if file.suffix == ".conllu":
        return [TaggedSentence(sentence.words, sentence.tags) for sentence in read_conllu(file)]
    try:
        lines = read_regular(file, MOST_DATA_BYTES).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start}); convert the file to UTF-8") from None
    sentences = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):  # the empty line at the end ends the last sentence
        text = line.strip()
        if not text:
            if words:
                sentences.append(TaggedSentence(tuple(words), tuple(tags)))
            words = []
            tags = []
        elif not text.startswith("-DOCSTART-"):
            word, tag = _word_and_tag(file, number, text)
            words.append(word)
            tags.append(tag)
    if not sentences:
        raise UserError(
            f"{file}: no sentences; write a word and its tag on each line, and an empty line between sentences"
        )
    return sentences


def tags_of(sentences: Sequence[TaggedSentence]) -> tuple[str, ...]:
    """Return all tags that occur in some sentences, sorted, each once."""
    return tuple(sorted({tag for sentence in sentences for tag in sentence.tags}))


def _word_and_tag(file: Path, number: int, line: str) -> tuple[str, str]:
    """Return the first and the last column of a line.

    Args:
        file: the file, for messages.
        number: number of the line, from 1.
        line: the line without white space at its ends.

    Raises:
        UserError: the line has one column only.
    """
    columns = line.split("\t") if "\t" in line else line.split()
    if len(columns) < _MIN_COLUMNS:
        raise UserError(f"{file}:{number}: `{line}` has no tag; write the word, a tab and its tag")
    return columns[0].strip(), columns[-1].strip()
