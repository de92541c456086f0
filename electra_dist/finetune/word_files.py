"""Read sentences of words: treebanks in CoNLL-U format, and files of tagged words in columns, as in CoNLL-2003.

Guarantee: every line belongs to a sentence, separates two, or is a comment; a line that fits none of these is an error
with its number. Words of CoNLL-U are the syntactic words of the tree; lines of multiword tokens (ID 1-2) and of empty
nodes (ID 5.1) are left out, as the format prescribes. A file of another layout is refused: lines of different widths,
tags with spaces in them, numbers or underscores in place of the words.

How: the suffix decides the format. In `.conllu`, the tag of a word is its universal part of speech. In all others, a
line has the word in its first and the tag in its last column, separated by tabs, or by spaces if it has no tab. No
other character separates columns, so a word may contain a no-break space. An empty line ends a sentence. Lines that
begin with -DOCSTART- separate documents and are left out. So are comments: lines that begin with `#` and a space or
tab, stand before the words of a sentence, and have another number of columns than all words.

Source: https://universaldependencies.org/format.html
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular
from electra_dist.tables import split_lines

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
            has_valid_head = head.isdecimal() and int(head) <= num_words and int(head) != number
            has_form_and_tag = columns[_FORM] and columns[_UPOS] not in ("", "_")
            is_next_word = columns[_ID] == str(number)
            if not (has_valid_head and has_form_and_tag and is_next_word):
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
    """Yield for each sentence the number of the line (from 1) of its first word, and the columns of each of its words.

    Lines of multiword tokens (ID 1-2) and of empty nodes (ID 5.1) are left out.
    """
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


_COLUMN_SUFFIXES = (".txt", ".conll", ".tsv", ".bio", ".iob2")
_NAMES_OF_SPLIT = {"train": ("train",), "dev": ("dev", "valid", "validation", "testa")}
_MIN_COLUMNS = 2  # word and tag
# Names that a first line gives to the columns of words and of tags.
_WORD_TITLES = ("word", "words", "token", "tokens", "form", "text")
_TAG_TITLES = ("tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "pos", "pos_tag", "pos_tags", "upos")
_WORD_NUMBER = re.compile(r"\d+([-.]\d+)?")  # as the first column of CoNLL-U has them


class TaggedSentence(NamedTuple):
    """Words of a sentence, and the tag of each word."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class _Line(NamedTuple):
    """Non-empty line of a file with columns, split at tabs or spaces."""

    number: int  # from 1
    text: str
    columns: list[str]
    has_tabs: bool  # whether tabs separate its columns, otherwise spaces

    @property
    def layout(self) -> tuple[bool, int]:
        return self.has_tabs, len(self.columns)

    @classmethod
    def parse(cls, number: int, text: str) -> _Line:
        has_tabs = "\t" in text
        columns = [column.strip(" ") for column in text.split("\t")] if has_tabs else re.split(" +", text)
        return cls(number, text, columns, has_tabs)


def find_tagged_file(folder: Path, split: str) -> Path | None:
    """Return a folder's only file for `split`, "train" or "dev", or None; raise UserError if there are several.

    A training file is named train, a development file dev, valid, validation or testa, with the suffix .conllu, .txt,
    .conll, .tsv, .bio or .iob2. Names of treebank files, such as en_ewt-ud-train.conllu, are found, too.
    """
    suffixes = (".conllu", *_COLUMN_SUFFIXES)
    files = [folder / f"{name}{suffix}" for name in _NAMES_OF_SPLIT[split] for suffix in suffixes]
    found = [file for file in files if file.is_file()] + sorted(folder.glob(f"*-{split}.conllu"))
    if len(found) > 1:
        raise UserError(
            f"{folder}: {' and '.join(file.name for file in found)} are both {split} files; keep one of them"
        )
    return found[0] if found else None


def read_tagged_file(file: Path) -> list[TaggedSentence]:
    """Read the words and tags of a file: in CoNLL-U format if its suffix is .conllu, otherwise in columns.

    A line of columns, which tabs or spaces separate, is a word: the first column is its text, the last its tag. An
    empty line ends a sentence. Lines that begin with -DOCSTART-, and comments, are left out.
    """
    if file.suffix.lower() == ".conllu":
        return [TaggedSentence(sentence.words, sentence.tags) for sentence in read_conllu(file)]
    sentences = []
    for lines in _sentence_lines(file):
        words = tuple(line.columns[0] for line in lines)
        check_words(words, f"{file}:{lines[0].number}")
        sentences.append(TaggedSentence(words, tuple(line.columns[-1] for line in lines)))
    if not sentences:
        raise UserError(
            f"{file}: no sentences; write a word and its tag on each line, and an empty line between sentences"
        )
    _check_first_column(file, sentences)
    return sentences


def tags_of(sentences: Sequence[TaggedSentence]) -> tuple[str, ...]:
    """Return the different tags of all sentences, sorted."""
    return tuple(sorted({tag for sentence in sentences for tag in sentence.tags}))


def _sentence_lines(file: Path) -> list[list[_Line]]:
    """Read a file with columns, and return the lines of each sentence; comments are left out."""
    blocks: list[list[_Line]] = [[]]
    for number, text in enumerate(split_lines(read_regular(file, MOST_DATA_BYTES), file), start=1):
        if not text.strip(" \t"):
            blocks.append([])
        elif not text.startswith("-DOCSTART-"):
            blocks[-1].append(_Line.parse(number, text.strip(" ")))

    # A line that looks like a comment is a word only if it has the columns of the other lines.
    other_lines = [line for block in blocks for line in block[_num_comment_like_lines(block) :]]
    layouts = {line.layout for line in other_lines}
    tags = {line.columns[-1] for line in other_lines}
    sentences = []
    for block in blocks:
        num_marked = _num_comment_like_lines(block)
        marked_words = [line for line in block[:num_marked] if line.layout in layouts]
        for line in marked_words:
            if line.columns[-1] not in tags:
                raise UserError(
                    f"{file}:{line.number}: `{line.text}` may be a comment, or the word # with a tag that no other "
                    "line has; remove comments from the file"
                )
        sentences.append(marked_words + block[num_marked:])
    all_lines = [line for lines in sentences for line in lines]
    _check_columns(file, all_lines)
    _refuse_titles(file, all_lines)
    return [lines for lines in sentences if lines]


def _num_comment_like_lines(block: Sequence[_Line]) -> int:
    """Return how many lines at the beginning of a block look like comments: they begin with # and a space or tab.

    A block is a sentence's words, one on each line, with the comments before them.
    """
    for number, line in enumerate(block):
        if line.columns[0] != "#" and not line.columns[0].startswith("# "):
            return number
    return len(block)


def _check_columns(file: Path, lines: Sequence[_Line]) -> None:
    """Raise UserError for the first line without word or tag, or with another number of columns than earlier lines."""
    first_of: dict[bool, _Line] = {}  # the first line with tabs, and the first one without
    for line in lines:
        if len(line.columns) < _MIN_COLUMNS or not line.columns[0] or not line.columns[-1]:
            what = "word" if not line.columns[0] else "tag"
            raise UserError(f"{file}:{line.number}: `{line.text}` has no {what}; write the word, a tab and its tag")
        tag = line.columns[-1]
        if any(map(str.isspace, tag)):
            raise UserError(
                f"{file}:{line.number}: the tag `{tag}` has a space in it; write one word, a tab and its tag on each "
                f"line"
            )
        # Lines with tabs may leave out the columns between word and tag. Lines with spaces may not, because a word
        # with a space in it looks like that.
        if line.has_tabs and len(line.columns) == _MIN_COLUMNS:
            continue
        first = first_of.setdefault(line.has_tabs, line)
        if len(line.columns) != len(first.columns):
            raise UserError(
                f"{file}:{line.number}: {len(line.columns)} columns, but line {first.number} has "
                f"{len(first.columns)}; write one word, a tab and its tag on each line"
            )


def _refuse_titles(file: Path, lines: Sequence[_Line]) -> None:
    """Raise UserError if the first line names the columns: it would be a word with a tag that no other word has."""
    if not lines or lines[0].columns[0].lower() not in _WORD_TITLES or lines[0].columns[-1].lower() not in _TAG_TITLES:
        return
    if all(line.columns[-1] != lines[0].columns[-1] for line in lines[1:]):
        raise UserError(
            f"{file}:{lines[0].number}: `{lines[0].text}` names the columns and is no word with its tag; remove the "
            "line"
        )


def _check_first_column(file: Path, sentences: Sequence[TaggedSentence]) -> None:
    """Raise UserError if the first column cannot be words: numbers only, or the same word in each of several lines."""
    words = [word for sentence in sentences for word in sentence.words]
    if len(words) == 1:
        return
    if all(map(_WORD_NUMBER.fullmatch, words)):
        raise UserError(
            f"{file}: the first column has numbers in place of words; remove it, or name the file {file.stem}.conllu "
            f"if it is in CoNLL-U format"
        )
    if len(set(words)) == 1:
        raise UserError(f"{file}: every word is `{words[0]}`; put the words into the first column")


def read_words(file: Path) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]] | None]:
    """Return the words of each sentence of a file, and their tags if the file has some, otherwise None.

    A file without tags has one word on each line, an empty line after a sentence, and no tab or space.
    """
    lines = [line.strip(" ") for line in split_lines(read_regular(file, MOST_DATA_BYTES), file)]
    if file.suffix.lower() == ".conllu" or any("\t" in line or " " in line for line in lines):
        sentences = read_tagged_file(file)
        return [sentence.words for sentence in sentences], [sentence.tags for sentence in sentences]
    text = "\n".join(lines).strip("\n")
    if not text:
        raise UserError(f"{file}: no sentences; write a word on each line, and an empty line between sentences")
    blocks = re.split(r"\n{2,}", text)  # empty lines separate sentences
    return [tuple(block.split("\n")) for block in blocks], None
