"""Count documents, bytes and tokens of each source of a corpus.

Every count is a sum over documents. The counts of chunks and buckets can therefore be added in any order, and do not
depend on the number of workers or on interruptions of the build. This module imports nothing heavy: worker processes
use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

# Prefixes of keys that end in a kind of skipped document, or in a number of tokens.
SKIPPED = "skipped/"
SKIPPED_BYTES = "skipped_bytes/"
LENGTH = "length/"


class DocumentCounts(Counter[str]):
    """Counts of the documents of one source.

    Keys: documents, bytes (undecoded), used, heldout, tokens, unk_tokens, undecodable_documents, undecodable_bytes;
    skipped/KIND and skipped_bytes/KIND for each kind of skipped document; length/N for documents of N tokens up to
    2N - 1, where N is a power of two.
    """

    def add_read(self, num_bytes: int) -> None:
        """Count a document that was read, with its bytes before decoding."""
        self["documents"] += 1
        self["bytes"] += num_bytes

    def add_skipped(self, kind: str, num_bytes: int) -> None:
        """Count a document that is left out, under its kind (a key of `SKIPPED_KINDS`)."""
        self[SKIPPED + kind] += 1
        self[SKIPPED_BYTES + kind] += num_bytes

    def add_undecodable(self, num_bytes: int) -> None:
        """Count a document's bytes that are not UTF-8, whether the document is left out or the bytes are replaced."""
        if num_bytes:
            self["undecodable_documents"] += 1
            self["undecodable_bytes"] += num_bytes

    def add_kept(self, outcome: str, sentences: Iterable[list[int]], unk_id: int) -> None:
        """Count a document with `outcome` "used" or "heldout", its tokens (at least one), its [UNK] and its length."""
        num_tokens = 0
        for ids in sentences:
            num_tokens += len(ids)
            self["unk_tokens"] += ids.count(unk_id)
        self[outcome] += 1
        self["tokens"] += num_tokens
        length_bin = 1 << (num_tokens.bit_length() - 1)  # the largest power of two that is not above num_tokens
        self[f"{LENGTH}{length_bin}"] += 1


SourceCounts = dict[str, DocumentCounts]  # source -> counts of its documents


def add_sources(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up counts of several parts of a corpus; return source -> key of `DocumentCounts` -> number, keys sorted."""
    totals: dict[str, Counter[str]] = {}
    for part in parts:
        for source, counts in part.items():
            totals.setdefault(source, Counter()).update(counts)
    return {source: dict(sorted(totals[source].items())) for source in sorted(totals)}
