"""Write and read build.json, the report of a corpus build: what was read, what was left out, and what came of it.

Guarantee: the report is the same for any number of workers and of interruptions of the build. It lies beside
corpus.json, is written before it, and is no part of the corpus: neither the fingerprint nor a run depends on it.

How: the record of each input group has the counts of its files, and the record of each bucket has the counts of its
documents and tokens (`stages/build_records.py`). The last stage of a build adds up the records of all groups and
buckets, so the counts are complete if the build was resumed, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from electra_dist.config import Section
from electra_dist.corpus.inputs.skipped_inputs import SkippedInputs
from electra_dist.corpus.report.document_counts import LENGTH, SKIPPED, SKIPPED_BYTES
from electra_dist.corpus.report.source_notes import PreparedText, SourceNotes
from electra_dist.corpus.text_decoding import SKIPPED_KINDS, Undecodable
from electra_dist.data.verified_read import read_verified
from electra_dist.errors import UserError
from electra_dist.store.interface import Store
from electra_dist.store.json_file import DamagedJson, first_fault, parse_json

if TYPE_CHECKING:
    # A training process imports this module, but has no need of the packages that read the formats of text files.
    from electra_dist.corpus.text_readers import StreamCounts

REPORT_KEY = "build.json"


class FileCounts(Section):
    """Number and size of some input files."""

    files: int = Field(description="number of files; an archive is one file")
    bytes: int = Field(description="their size on disk")


class SkippedDocuments(Section):
    """Number and size of the documents that were left out for one reason."""

    documents: int = Field(description="number of documents")
    bytes: int = Field(description="their size before decoding")


class UndecodableText(Section):
    """Bytes that are not UTF-8, and what was done about them."""

    policy: Undecodable = Field(description="corpus.undecodable of the build")
    documents: int = Field(description="documents with such bytes: left out (skip) or used without them (replace)")
    bytes: int = Field(description="such bytes in all documents")


class TokenCounts(Section):
    """Number of documents in the corpus, held-out ones included, and of their tokens of text."""

    documents: int = Field(description="documents that were used or held out")
    tokens: int = Field(description="their tokens, without [CLS], [SEP] and [PAD]")
    unk_tokens: int = Field(description="tokens that are [UNK]")
    unk_rate: float = Field(description="unk_tokens / tokens; 0 without tokens")
    tokens_per_document: float = Field(description="tokens / documents; 0 without documents")


class SourceReport(TokenCounts):
    """Counts of one source of a corpus: an input that the user gave, or a folder directly in such an input."""

    files: int = Field(description="files read")
    bytes: int = Field(description="their size on disk")
    documents_in: int = Field(description="documents read")
    documents_skipped: int = Field(description="documents left out, for any reason")
    licence: str | None = Field(default=None, description="licence of the source's text; null: not stated")


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
    undecodable: UndecodableText = Field(description="bytes that are not UTF-8")
    text: TokenCounts = Field(description="the documents in the corpus and their tokens, over all sources")
    document_lengths: dict[str, int] = Field(
        description="documents in the corpus by their tokens: N -> documents of N up to 2N - 1 tokens"
    )
    sources: dict[str, SourceReport] = Field(description="the same by source")
    prepared: dict[str, PreparedText] = Field(
        default={}, description="source that `corpus prepare` made -> counts of its prepare.json"
    )


def make_report(
    skipped: SkippedInputs,
    stream: StreamCounts,
    sources: Mapping[str, Mapping[str, int]],
    undecodable: Undecodable,
    notes: SourceNotes,
) -> BuildReport:
    """Combine the counts of a finished build into its report, the content of build.json.

    `skipped` counts the inputs that the search for files left out, `stream` the files that were read. `sources` maps
    each source to the counts of its documents (`DocumentCounts`), held-out ones included.
    """
    all_skipped = skipped.joined(stream.skipped)
    totals: Counter[str] = Counter()
    for counts in sources.values():
        totals.update(counts)
    return BuildReport(
        files_read={
            ending: FileCounts(files=number, bytes=stream.file_bytes[ending])
            for ending, number in sorted(stream.files.items())
        },
        members_read=dict(sorted(stream.members.items())),
        inputs_skipped=all_skipped.by_reason(),
        skipped_names=dict(all_skipped.names),
        bytes_in=stream.file_bytes.total(),
        document_bytes_in=totals["bytes"],
        documents_in=totals["documents"],
        documents_used=totals["used"],
        documents_heldout=totals["heldout"],
        documents_skipped={
            kind: SkippedDocuments(documents=totals[SKIPPED + kind], bytes=totals[SKIPPED_BYTES + kind])
            for kind in SKIPPED_KINDS
        },
        undecodable=UndecodableText(
            policy=undecodable, documents=totals["undecodable_documents"], bytes=totals["undecodable_bytes"]
        ),
        text=TokenCounts(**_token_counts(totals)),
        document_lengths=_lengths(totals),
        sources={
            source: _source_report(source, Counter(sources.get(source, {})), stream, notes)
            for source in sorted({*sources, *stream.source_files})
        },
        prepared=dict(sorted(notes.prepared.items())),
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
    """Return a histogram of document lengths: power of two N -> number of documents of N to 2N - 1 tokens."""
    powers = sorted(int(key.removeprefix(LENGTH)) for key in counts if key.startswith(LENGTH))
    return {str(power): counts[f"{LENGTH}{power}"] for power in powers}


def _source_report(source: str, counts: Counter[str], stream: StreamCounts, notes: SourceNotes) -> SourceReport:
    return SourceReport(
        **_token_counts(counts),
        files=stream.source_files[source],
        bytes=stream.source_bytes[source],
        documents_in=counts["documents"],
        documents_skipped=sum(number for key, number in counts.items() if key.startswith(SKIPPED)),
        licence=notes.licence(source),
    )


def write_report(store: Store, report: BuildReport) -> None:
    """Write build.json beside corpus.json, indented for people to read."""
    text = json.dumps(report.model_dump(mode="json"), indent=2)
    store.write(REPORT_KEY, (text + "\n").encode())


def read_report(store: Store) -> BuildReport | None:
    """Return the report of the corpus in `store`; None if it has no build.json, as in earlier versions.

    Raises UserError if build.json is damaged or of another version of the format.
    """
    if not store.exists(REPORT_KEY):
        return None

    def parse(data: bytes) -> BuildReport:
        try:
            return BuildReport.model_validate(parse_json(data))
        except (DamagedJson, ValidationError) as error:
            reason = first_fault(error) if isinstance(error, ValidationError) else str(error)
            raise UserError(
                f"{store.url}/{REPORT_KEY}: not a report of a build ({reason}); delete the file, which no run needs"
            ) from None

    return read_verified(store, REPORT_KEY, parse)


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
