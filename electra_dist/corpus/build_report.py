"""Write and read build.json, the report of a corpus build: what was read, what was left out, and what came of it.

Guarantee: the report is the same for any number of workers and of interruptions of the build. It lies beside
corpus.json, is written before it, and is no part of the corpus: neither the fingerprint nor a run depends on it. An
input counts as made by `corpus prepare` only if prepare.json lies beside it, which a preparation writes last.

It also judges the share of [UNK] in tokenized texts: a vocabulary that does not fit its texts turns them into [UNK].

How: the records of input groups and of buckets have counts (`counts.py`). The last stage of a build adds them up, so
the report is complete if the build was resumed, too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from electra_dist.config import Section
from electra_dist.corpus.counts import (
    LENGTH,
    MAX_FIELDS,
    SHAPE,
    SKIP_REASONS,
    SKIPPED,
    SKIPPED_BYTES,
    Counts,
    TextShape,
    most_frequent,
    remark_on_shape,
    skipped_documents,
)
from electra_dist.corpus.inputs.text_decoding import SKIPPED_KINDS, Undecodable
from electra_dist.errors import UserError
from electra_dist.store.interface import Store
from electra_dist.store.json_file import find_document
from electra_dist.store.open_store import REMOTE_SCHEMES, open_store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

REPORT_KEY = "build.json"
NAMED_RATE = 0.05  # share of [UNK] from which on a source is named to the user
_PREPARE_KEY = "prepare.json"
_WORST_FILES = 10  # files that are named for each kind of skipped document
_DOCUMENTS_FOLDER = "documents"  # in the output of a preparation


class FileCounts(Section):
    """Entry of build.json: the number of input files with one ending, and their size."""

    files: int = Field(description="number of files; an archive is one file")
    bytes: int = Field(description="their size on disk")


class SkippedDocuments(Section):
    """Entry of build.json: the documents that were left out for one reason, and the files with most of them."""

    documents: int = Field(description="number of documents")
    bytes: int = Field(description="their size before decoding")
    files: int = Field(default=0, description="number of files with such documents")
    worst_files: dict[str, int] = Field(
        default={}, description="the ten of these files with most such documents -> documents"
    )


class UndecodableText(Section):
    """Entry of build.json about bytes that are not UTF-8: how many there were, and what was done about them."""

    policy: Undecodable = Field(description="corpus.undecodable of the build")
    documents: int = Field(description="documents with such bytes: left out (skip) or used without them (replace)")
    bytes: int = Field(description="such bytes in all documents")


class TokenCounts(Section):
    """Counts of the documents in a corpus, held-out ones included, of their tokens, and of the [UNK] among these."""

    documents: int = Field(description="documents that were used or held out")
    tokens: int = Field(description="their tokens, without [CLS], [SEP] and [PAD]")
    unk_tokens: int = Field(description="tokens that are [UNK]")
    unk_rate: float = Field(description="unk_tokens / tokens; 0 without tokens")
    tokens_per_document: float = Field(description="tokens / documents; 0 without documents")


class SourceReport(TokenCounts):
    """Counts of one source of a corpus: an input that the user gave, or a folder directly in such an input.

    The files of a folder, or of a brace pattern, are counted together under its name; only their number is kept.
    """

    files: int = Field(description="files read")
    bytes: int = Field(description="their size on disk")
    documents_in: int = Field(description="documents read")
    documents_skipped: int = Field(description="documents left out, for any reason")
    licence: str | None = Field(default=None, description="licence of the source's text; null: not stated")
    shape: TextShape = Field(default=TextShape(), description="counts by which input that is no text is recognised")


class BuildReport(Section):
    """Content of build.json: everything that a build has read and left out, in numbers."""

    format: Literal[1] = Field(default=1, description="version of the file's format")
    files_read: dict[str, FileCounts] = Field(description="files read, by the ending of their names")
    members_read: dict[str, int] = Field(description="members of archives that were read, by ending")
    inputs_skipped: dict[str, dict[str, int]] = Field(
        description="files, links, folders and members of archives that were left out: reason -> ending -> number"
    )
    skipped_names: dict[str, list[str]] = Field(description="names of the first 1,000 of these, by reason")
    bytes_in: int = Field(description="size of all files read, on disk")
    document_bytes_in: int = Field(description="size of all documents read, decompressed, before decoding")
    documents_in: int = Field(description="documents read: used, held out or skipped")
    documents_used: int = Field(description="documents in the training corpus")
    documents_heldout: int = Field(description="documents in the held-out corpus")
    documents_skipped: dict[str, SkippedDocuments] = Field(description="documents left out, by reason")
    other_fields: dict[str, int] = Field(
        default={}, description="fields with text of records without the text's field -> number of such records"
    )
    undecodable: UndecodableText = Field(description="bytes that are not UTF-8")
    text: TokenCounts = Field(description="the documents in the corpus and their tokens, over all sources")
    document_lengths: dict[str, int] = Field(
        description="documents in the corpus by their tokens: N -> documents of N up to 2N - 1 tokens"
    )
    sources: dict[str, SourceReport] = Field(description="the same by source")
    prepared: dict[str, PreparedText] = Field(
        default={}, description="source that `corpus prepare` made -> counts of its prepare.json"
    )


def make_report(counts: Counts, undecodable: Undecodable, notes: SourceNotes) -> BuildReport:
    """Return the report of a finished build, the content of build.json, from the sum of all its counts."""
    totals = counts.all_sources()
    return BuildReport(
        files_read={ending: FileCounts(**numbers) for ending, numbers in sorted(counts.files.items())},
        members_read=dict(sorted(counts.members.items())),
        inputs_skipped=counts.skipped_by_reason(),
        skipped_names={reason: counts.skipped_names[reason] for reason in SKIP_REASONS if reason in counts.skipped},
        bytes_in=totals["file_bytes"],
        document_bytes_in=totals["bytes"],
        documents_in=totals["documents"],
        documents_used=totals["used"],
        documents_heldout=totals["heldout"],
        documents_skipped={
            kind: _skipped_documents(totals, kind, counts.losses.get(kind, Counter())) for kind in SKIPPED_KINDS
        },
        other_fields=dict(most_frequent(counts.other_fields, MAX_FIELDS)),
        undecodable=UndecodableText(
            policy=undecodable, documents=totals["undecodable_documents"], bytes=totals["undecodable_bytes"]
        ),
        text=TokenCounts(**_token_counts(totals)),
        document_lengths=_lengths(totals),
        sources={source: _source_report(source, numbers, notes) for source, numbers in sorted(counts.sources.items())},
        prepared=dict(sorted(notes.prepared.items())),
    )


def _skipped_documents(totals: Counter[str], kind: str, files: Counter[str]) -> SkippedDocuments:
    return SkippedDocuments(
        documents=totals[SKIPPED + kind],
        bytes=totals[SKIPPED_BYTES + kind],
        files=len(files),
        worst_files=dict(most_frequent(files, _WORST_FILES)),
    )


def _token_counts(counts: Counter[str]) -> dict[str, Any]:
    documents = counts["used"] + counts["heldout"]
    tokens = counts["tokens"]
    return {
        "documents": documents,
        "tokens": tokens,
        "unk_tokens": counts["unk_tokens"],
        "unk_rate": counts["unk_tokens"] / tokens if tokens else 0.0,
        "tokens_per_document": tokens / documents if documents else 0.0,
    }


def _lengths(counts: Counter[str]) -> dict[str, int]:
    """Return, for each power of two N, ascending, how many documents have N to 2N - 1 tokens, unless none has."""
    powers = sorted(int(key.removeprefix(LENGTH)) for key in counts if key.startswith(LENGTH))
    return {str(power): counts[f"{LENGTH}{power}"] for power in powers}


def _source_report(source: str, counts: Counter[str], notes: SourceNotes) -> SourceReport:
    return SourceReport(
        **_token_counts(counts),
        files=counts["files"],
        bytes=counts["file_bytes"],
        documents_in=counts["documents"],
        documents_skipped=skipped_documents(counts),
        licence=notes.licence(source),
        shape=TextShape(**{name: counts[SHAPE + name] for name in TextShape.model_fields}),
    )


def write_report(store: Store, report: BuildReport) -> None:
    """Write build.json beside corpus.json, indented for people to read."""
    text = json.dumps(report.model_dump(mode="json"), indent=2)
    store.write(REPORT_KEY, (text + "\n").encode())


def read_report(store: Store) -> BuildReport | None:
    """Return the report of the corpus in `store`, or None if it has no build.json because its shards were indexed.

    Raises UserError if build.json is damaged or of another version of the format.
    """
    return find_document((store, REPORT_KEY), BuildReport, "delete the file, which no run needs")


def corpus_sources(store: Store) -> dict[str, dict[str, Any]]:
    """Return a corpus's sources for a run's environment.json: source -> {"tokens": number, "licence": str or None}.

    The result is empty if build.json is missing or damaged, because a run does not need that file.
    """
    try:
        report = read_report(store)
    except UserError:
        return {}
    if report is None:
        return {}
    return {name: {"tokens": source.tokens, "licence": source.licence} for name, source in report.sources.items()}


class PreparedSource(Section):
    """Licence of one source of `corpus prepare`, and its counts of documents; prepare.json has further counts."""

    model_config = ConfigDict(extra="ignore")

    license: str = Field(description="licence of the source as the YAML file of the preparation states it")
    documents_in: int = Field(description="documents that the preparation read")
    documents_dropped: int = Field(description="documents that any step of the preparation dropped")
    documents_out: int = Field(description="documents that the preparation kept")


class PreparedText(Section):
    """Counts of one run of `corpus prepare`, whose output is one source of a corpus; prepare.json has more."""

    model_config = ConfigDict(extra="ignore")

    sources: dict[str, PreparedSource] = Field(description="source of the preparation -> its licence and counts")
    dropped: dict[str, dict[str, dict[str, int]]] = Field(
        description="step -> reason -> source -> number of documents that the step dropped"
    )


class SourceNotes(Section):
    """Licences of a corpus's sources, and the counts of those that `corpus prepare` made, for build.json."""

    licences: dict[str, str] = Field(default={}, description="source -> its licence, as corpus.licences states it")
    prepared: dict[str, PreparedText] = Field(default={}, description="source -> counts of its preparation")

    def licence(self, source: str) -> str | None:
        """Return a source's licence from corpus.licences, otherwise from its prepare.json; None if unknown."""
        if source in self.licences:
            return self.licences[source]
        if source in self.prepared:
            return ", ".join(sorted({prepared.license for prepared in self.prepared[source].sources.values()}))
        return None


def find_preparations(inputs: Sequence[str], endpoint_url: str | None) -> dict[str, PreparedText]:
    """Find the given inputs that `corpus prepare` wrote; return source -> counts of the preparation.

    An input is recognized if it is the folder `documents` in the command's output or, on a local disk, the output
    folder itself. Raises UserError if a prepare.json is damaged.
    """
    prepared: dict[str, PreparedText] = {}
    for location in inputs:
        is_remote = location.startswith(REMOTE_SCHEMES)
        if "://" in location and not is_remote:
            continue  # a URL of another kind, such as hf://, to which no preparation writes
        path = location.rstrip("/") if is_remote else os.path.normpath(location)
        folder, _, name = path.rpartition("/")
        if name == _DOCUMENTS_FOLDER:
            text = _read_preparation(folder or ".", endpoint_url)
            source = path
        elif not is_remote and os.path.isdir(path):
            text = _read_preparation(path, None)
            source = f"{path}/{_DOCUMENTS_FOLDER}"
        else:
            continue
        if text is not None:
            prepared[source] = text
    return prepared


def _read_preparation(folder: str, endpoint_url: str | None) -> PreparedText | None:
    """Return the counts that `corpus prepare` left in a folder's prepare.json; None if the folder has no such file."""
    place = (open_store(folder, endpoint_url), _PREPARE_KEY)
    return find_document(place, PreparedText, "run `electra-dist corpus prepare` again, or delete the file")


class UnknownTokens(NamedTuple):
    """Counts for one text: its tokens without [CLS], [SEP] and [PAD], and how many of them are [UNK]."""

    tokens: int
    unk_tokens: int

    @property
    def rate(self) -> float:
        """Return the share of [UNK] among the tokens; 0 if there are none."""
        return self.unk_tokens / self.tokens if self.tokens else 0.0


def unknown_tokens_of_rows(ids: NDArray[np.integer], special: Mapping[str, int]) -> UnknownTokens:
    """Count the tokens and the [UNK] in rows of token ids; `special` maps BERT's special tokens to their ids."""
    import numpy as np  # not for `corpus info`, which only reads a report

    num_unknown = int(np.count_nonzero(ids == special["[UNK]"]))
    ends = [special[token] for token in ("[PAD]", "[CLS]", "[SEP]")]
    return UnknownTokens(int(np.count_nonzero(~np.isin(ids, ends))), num_unknown)


def unknown_tokens_of_report(report: BuildReport) -> dict[str, UnknownTokens]:
    """Return the number of tokens, and of [UNK] among them, for each source in the report of a build."""
    return {name: UnknownTokens(source.tokens, source.unk_tokens) for name, source in report.sources.items()}


def remarks_on_shape(report: BuildReport) -> list[str]:
    """Return a line for each source whose documents look like something else than text, such as base64."""
    lines = [remark_on_shape(name, source.shape) for name, source in report.sources.items()]
    return [line for line in lines if line]


def remarks_on_unknown_tokens(counts: Mapping[str, UnknownTokens], max_rate: float, key: str, place: str) -> list[str]:
    """Return a line for each source with 5 % of [UNK] or more; raise UserError if one has more than `max_rate`.

    Lines and error begin with `place`, such as the corpus's URL. The error also names `key`, the config key that sets
    `max_rate`.
    """
    lines = []
    for source, count in counts.items():
        of_source = f"{place}: {100 * count.rate:.1f} % of the tokens of {source} are [UNK]"
        if count.rate > max_rate:
            raise UserError(
                f"{of_source}, more than {key} {max_rate:g} allows, because the vocabulary lacks their words; give "
                f"the vocabulary that belongs to the text, leave the source out, or set {key}=1 to accept it"
            )
        if count.rate >= NAMED_RATE:
            lines.append(f"{of_source}, because the vocabulary lacks their words")
    return lines
