"""Count what a corpus build reads, leaves out and makes, and add the counts of its parts.

Guarantee: every count is a sum over files, documents or rows. The order of the additions, the number of workers and
interruptions of the build therefore change nothing. The reports of a build (build.json, the totals of corpus.json) are
views of the sum of all counts.

`TextShape` recognises input that is no text: base64, the bytes of a program, or one character on each line. The first
500 characters of each document are measured. Words are separated by white space, and are counted on ASCII lines only,
because several scripts write none. Words of text have 4 to 8 characters on average, also in source code.

Limits: a source is judged as a whole. A tenth of base64 among text is not noticed, and neither is text of which only
the beginnings of the documents are text. This module imports nothing heavy, because worker processes and trainings use
it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from pydantic import Field

from electra_dist.config import Section
from electra_dist.corpus.inputs.file_kinds import encodable, ending_of
from electra_dist.corpus.inputs.text_decoding import SKIPPED_KINDS
from electra_dist.escapes import printable

_MEASURED = 500  # characters of a document
_LEAST = 200  # characters of a source that is judged
_LONG_WORDS = 20.0  # characters of a word on average, from which a source is no text
_SHORT = 2.0  # characters of a word or a line on average, up to which it is none
_MANY_CONTROLS = 0.01  # share of the characters
# Control characters except white space, and the character that stands for what could not be decoded.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufffd]")


class TextShape(Section):
    """Counts over the beginnings of some documents, by which input that is no text is recognised."""

    lines: int = Field(default=0, description="lines that are not empty")
    characters: int = Field(default=0, description="their characters that are no white space")
    plain_words: int = Field(default=0, description="words of the lines of ASCII")
    plain_characters: int = Field(default=0, description="characters of these words")
    controls: int = Field(default=0, description="control characters, and U+FFFD for what could not be decoded")

    @property
    def oddity(self) -> str:
        """Return why this is no text, in one clause with a figure; "" for text, or for fewer than 200 characters."""
        if self.characters < _LEAST:
            return ""
        if self.controls >= _MANY_CONTROLS * self.characters:
            share = self.controls / self.characters
            return f"{share:.1%} of its characters are control characters, as in a file that is not text"
        line = self.characters / self.lines
        if line <= _SHORT:
            return f"its lines have {line:.1f} characters on average"
        if 2 * self.plain_characters < self.characters:
            return ""
        word = self.plain_characters / self.plain_words
        if word >= _LONG_WORDS:
            return f"its words have {word:.0f} characters on average, as in base64; those of text have 4 to 8"
        if word <= _SHORT:
            return f"its words have {word:.1f} characters on average, as in a dump of bytes; those of text have 4 to 8"
        return ""


def measure(text: str) -> Counter[str]:
    """Count lines, words and characters in the first 500 characters of a document: field of `TextShape` -> number."""
    counts: Counter[str] = Counter()
    beginning = text[:_MEASURED]
    for line in beginning.split("\n"):
        words = line.split()
        if not words:
            continue
        num_characters = sum(map(len, words))
        counts["lines"] += 1
        counts["characters"] += num_characters
        if line.isascii():
            counts["plain_words"] += len(words)
            counts["plain_characters"] += num_characters
    counts["controls"] = len(_CONTROL.findall(beginning))
    return counts


def remark_on_shape(source: str, shape: TextShape) -> str:
    """Return a line for the user if a source looks like base64, a program or other data that is no text, else ""."""
    oddity = shape.oddity
    return oddity and f"{source} looks like no text: {oddity}; check it, and leave it out or decode it first"


def remarks_on_texts(source: str, texts: Iterable[str]) -> list[str]:
    """Return one line for the user if the texts of a source, such as a file, look like no text; otherwise []."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(measure(text))
    remark = remark_on_shape(source, TextShape(**counts))
    return [remark] if remark else []


# Reason for which a file, a folder or a member of an archive is not read -> explanation for the user.
SKIP_REASONS = {
    "unknown_kind": "no known ending",
    "page": "web pages, which `electra-dist corpus prepare` reads",
    "hidden": "hidden: the name begins with a dot",
    "no_data": "named as Spark names what is no data: _temporary, _delta_log, or a table with _ before its name",
    "broken_link": "a link to nothing",
    "read_before": "a link or second path to what is read under another name",
    "not_a_file": "no regular file, such as a pipe, or a link within an archive",
    "empty_file": "no bytes at all, as after a failed download",
    "no_text_column": "a table without the column of --text-field",
    "metadata": "JSON or another text beside the text of a WebDataset sample",
}
_NAMES_SHOWN = 10  # of these names in a message
MAX_NAMES = 1000  # names that are kept for each reason; the counts are exact all the same
FIELDS_FOUND = "fields with text in records without the text's field"  # begins a line that lists them
MAX_FIELDS = 20  # names of fields that are kept of records without the text's field
# Prefixes of counts of a source that end in a kind of skipped document, in a field of `TextShape`, or in a number of
# tokens.
SKIPPED = "skipped/"
SKIPPED_BYTES = "skipped_bytes/"
SHAPE = "shape/"
LENGTH = "length/"
Table = dict[str, Counter[str]]


class Counts(Section):
    """Counts of a part of a build: of the search for inputs, of files that were read, or of a chunk of documents.

    Each source has counts by name. Of its files: files and file_bytes (on disk). Of the documents in them: read and
    read_bytes. Of documents that became rows, each as often as it is used: documents and bytes (both before decoding),
    used, heldout, tokens, unk_tokens, undecodable_documents, undecodable_bytes, skipped/KIND, skipped_bytes/KIND,
    shape/FIELD (the fields of `TextShape`), and length/N for documents of N tokens up to 2N - 1, where N is a power of
    two.
    """

    files: Table = Field(default={}, description="ending of files that were read -> files, bytes (on disk)")
    members: Counter[str] = Field(default=Counter(), description="ending -> members of archives that were read")
    skipped: Table = Field(default={}, description="reason -> ending -> files, links, folders, members left out")
    skipped_names: dict[str, list[str]] = Field(default={}, description="reason -> names of the first of these")
    sources: Table = Field(default={}, description="source -> counts of its files and documents")
    losses: Table = Field(default={}, description="kind of skipped document -> file -> documents left out")
    other_fields: Counter[str] = Field(
        default=Counter(), description="field with text of a record without the text's field -> such records"
    )
    rows: Table = Field(default={}, description="train, heldout -> text_bytes, text_tokens, examples, rows, tokens")

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """Add up the counts of several parts of a build.

        Of the names of skipped inputs, the first `MAX_NAMES` for each reason are kept.
        """
        total = cls()
        for part in parts:
            for name in ("files", "skipped", "sources", "losses", "rows"):
                table: Table = getattr(total, name)
                for key, numbers in getattr(part, name).items():
                    table.setdefault(key, Counter()).update(numbers)
            total.members.update(part.members)
            total.other_fields.update(part.other_fields)
            for reason, names in part.skipped_names.items():
                kept = total.skipped_names.setdefault(reason, [])
                kept.extend(names[: MAX_NAMES - len(kept)])
        return total

    def skip_input(self, reason: str, name: str) -> None:
        """Count an input file, link or folder that is left out; a folder counts as one, whatever it contains.

        `reason` is a key of `SKIP_REASONS`; `name` is the path below the input folder, or "wiki/a.tar: 1.jpg" in an
        archive.
        """
        assert reason in SKIP_REASONS
        self.skipped.setdefault(reason, Counter())[ending_of(name)] += 1
        names = self.skipped_names.setdefault(reason, [])
        if len(names) < MAX_NAMES:
            names.append(encodable(name))

    def add_file(self, name: str, source: str, num_bytes: int) -> None:
        """Count a file that was read to its end; `num_bytes` is its size on disk."""
        of_ending = self.files.setdefault(ending_of(name), Counter())
        of_ending["files"] += 1
        of_ending["bytes"] += num_bytes
        of_source = self.of_source(source)
        of_source["files"] += 1
        of_source["file_bytes"] += num_bytes

    def of_source(self, source: str) -> Counter[str]:
        """Return the counts of a source, which the caller changes in place; they are empty for a new source."""
        return self.sources.setdefault(source, Counter())

    def skip_document(self, source: str, file: str, kind: str, num_bytes: int) -> None:
        """Count a document of `num_bytes` that is left out; `kind` says why and is a key of `SKIPPED_KINDS`."""
        self.losses.setdefault(kind, Counter())[file] += 1
        numbers = self.of_source(source)
        numbers[SKIPPED + kind] += 1
        numbers[SKIPPED_BYTES + kind] += num_bytes

    def forget_small_losses(self) -> None:
        """Bound the size of the counts: keep only the largest entries of `losses` and of `other_fields`.

        For each kind of skipped document, the `MAX_NAMES` files with most of them stay; of the fields, `MAX_FIELDS`.
        """
        limits = [(files, MAX_NAMES) for files in self.losses.values()]
        for counts, limit in [*limits, (self.other_fields, MAX_FIELDS)]:
            kept = dict(most_frequent(counts, limit))
            counts.clear()
            counts.update(kept)

    def add_undecodable(self, source: str, num_bytes: int) -> None:
        """Count a document's bytes that are not UTF-8, whether the document is left out or the bytes are replaced."""
        if num_bytes:
            numbers = self.of_source(source)
            numbers["undecodable_documents"] += 1
            numbers["undecodable_bytes"] += num_bytes

    def keep_document(self, source: str, outcome: str, sentences: Iterable[list[int]], unk_id: int) -> None:
        """Count a document whose `outcome` is "used" or "heldout", with the numbers of its tokens and of its [UNK].

        `sentences` are the token ids of its lines, `unk_id` is the id of [UNK].
        """
        numbers = self.of_source(source)
        num_tokens = 0
        for ids in sentences:
            num_tokens += len(ids)
            numbers["unk_tokens"] += ids.count(unk_id)
        numbers[outcome] += 1
        numbers["tokens"] += num_tokens
        length_bin = 1 << (num_tokens.bit_length() - 1)  # the largest power of two that is not above num_tokens
        numbers[f"{LENGTH}{length_bin}"] += 1

    def all_sources(self) -> Counter[str]:
        """Add up the counts of all sources: name of a count, such as "documents" -> number."""
        total: Counter[str] = Counter()
        for numbers in self.sources.values():
            total.update(numbers)
        return total

    def skipped_by_reason(self) -> dict[str, dict[str, int]]:
        """Return reason -> ending of the name -> number of inputs left out, without reasons that did not occur."""
        found = [reason for reason in SKIP_REASONS if reason in self.skipped]
        return {reason: dict(sorted(self.skipped[reason].items())) for reason in found}

    def summary_of_skipped(self) -> str:
        """Return the left-out inputs as one line, such as ".html 3, .pdf 1 (no known ending)", or "" if none."""
        parts = []
        for reason, numbers in self.skipped_by_reason().items():
            counts = ", ".join(f"{ending} {number:,}" for ending, number in numbers.items())
            parts.append(f"{counts} ({SKIP_REASONS[reason]})")
        return "; ".join(parts)

    def nothing_usable(self, next_step: str) -> str:
        """Return that no document gave text, with everything that was left out, the fields found and `next_step`."""
        documents = self.all_sources()
        reasons = self._reasons()
        if documents["heldout"]:
            reasons.append(f"held out {documents['heldout']:,}")
        if left_out := self.summary_of_skipped():
            reasons.append(f"left out: {left_out}")
        if not reasons:
            reasons.append("the inputs are empty")
        if self.other_fields:
            next_step = f"set --text-field to a field with text ({self.fields_found()}), or {next_step}"
        return f"no usable document among {documents['documents']:,} ({', '.join(reasons)}); {next_step}"

    def remarks_on_documents(self) -> list[str]:
        """Return a line on tables and one on documents that were left out, and one on the fields found instead."""
        lines = []
        if tables := self.skipped.get("no_text_column"):
            names = self.skipped_names["no_text_column"]
            lines.append(line_on_inputs("no_text_column", tables.total(), names))
        if reasons := self._reasons():
            documents = self.all_sources()
            lines.append(
                f"left out {skipped_documents(documents):,} of {documents['documents']:,} documents: "
                f"{', '.join(reasons)}"
            )
        if self.other_fields:
            lines.append(f"{FIELDS_FOUND}: {self.fields_found()}")
        return lines

    def _reasons(self) -> list[str]:
        documents = self.all_sources()
        return [f"{kind} {documents[SKIPPED + kind]:,}" for kind in SKIPPED_KINDS if documents[SKIPPED + kind]]

    def fields_found(self) -> str:
        """Return the most frequent fields with text of records without the text's field: "body, meta.title"."""
        return printable(", ".join(field for field, _ in most_frequent(self.other_fields, MAX_FIELDS)))


def line_on_inputs(reason: str, number: int, names: list[str]) -> str:
    """Name the first ten of `number` inputs that were left out for a reason, and say how many more there are."""
    more = f" and {number - _NAMES_SHOWN:,} more" if number > _NAMES_SHOWN else ""
    line = f"left out, {SKIP_REASONS[reason]}: {', '.join(names[:_NAMES_SHOWN])}{more}"
    if reason == "no_text_column":
        line += "; .txt files need no field: one --text-field serves both"
    return line


def most_frequent(counts: Counter[str], number: int) -> list[tuple[str, int]]:
    """Return the `number` names with the highest counts, highest first; names of equal counts are sorted."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number]


def skipped_documents(counts: Counter[str]) -> int:
    """Return how many documents are left out for any reason, from the counts of a source or of all sources."""
    return sum(number for key, number in counts.items() if key.startswith(SKIPPED))
