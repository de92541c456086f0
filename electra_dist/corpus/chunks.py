"""The unit of work: a chunk of documents -> rows. Pure, so any process may do it and in any order.

Guarantee: `process_chunk` depends on the chunk and the rules alone; every document of the chunk is counted once, as
used, held out or one kind of skipped; every token of a used document is in exactly one row.

How: the reading process cuts the stream of documents into chunks of about `chunk_bytes` and seeds each from its number
(`keyed_random`, purpose CORPUS), so the number of workers cannot matter. Packing stays within a chunk.

Cost: tokenisation is most of it. This module and what it imports is all that a worker process loads: no torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from electra_dist.corpus.documents import RawDocument, SkippedDocument, decode
from electra_dist.corpus.examples import ExampleBuilder
from electra_dist.corpus.rows import make_rows, row_dtype
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

_LINES_PER_CALL = 2048


@dataclass(frozen=True, kw_only=True)
class Rules:
    """All that decides what becomes of a document."""

    vocabulary_text: str
    lowercase: bool
    seq_len: int
    packing: Literal["rows", "none"]
    single_segment_prob: float
    short_target_prob: float
    heldout_fraction: float
    heldout_key: int
    text_field: str


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents, with the seeds of their two example builders and the position in the stream."""

    number: int
    documents: list[RawDocument]
    seed: int
    heldout_seed: int
    bytes_done: int
    stream_digest: str  # of all documents of the stream up to the end of this chunk


@dataclass
class Rows:
    """Rows of one corpus (training or held-out) and what went into them."""

    block: np.ndarray  # [rows, seq_len]
    counts: Counter[str] = field(default_factory=Counter)  # text_bytes, text_tokens, examples, rows, tokens


@dataclass
class ChunkRows:
    """What became of a chunk."""

    train: Rows
    heldout: Rows
    documents: Counter[str]  # in, used, heldout and each kind of SKIPPED_KINDS


class ChunkProcessor:
    """Turns chunks into rows; holds the tokenizer."""

    def __init__(self, rules: Rules) -> None:
        """Builds the tokenizer of `rules`."""
        self._rules = rules
        self._vocabulary = Vocabulary(rules.vocabulary_text, "vocab.txt")
        self._tokenizer = WordPieceTokenizer(self._vocabulary, rules.lowercase)
        self._heldout_key = rules.heldout_key.to_bytes(8, "little")

    def process(self, chunk: Chunk) -> ChunkRows:
        """The rows of a chunk, for the corpus and for its held-out part."""
        documents: Counter[str] = Counter()
        train, heldout = self._part(chunk.seed), self._part(chunk.heldout_seed)
        texts = self._decoded(chunk.documents, documents)
        for text, sentences in self._tokenized(texts, documents):
            is_heldout = self._is_heldout(text)
            documents["heldout" if is_heldout else "used"] += 1
            (heldout if is_heldout else train).add(text, sentences)
        skipped = sum(count for kind, count in documents.items() if kind not in ("in", "used", "heldout"))
        assert documents["in"] == documents["used"] + documents["heldout"] + skipped == len(chunk.documents)
        return ChunkRows(train.finish(), heldout.finish(), documents)

    def _decoded(self, raw: Iterable[RawDocument], documents: Counter[str]) -> Iterator[str]:
        for document in raw:
            documents["in"] += 1
            try:
                yield decode(document, self._rules.text_field)
            except SkippedDocument as skipped:
                documents[skipped.kind] += 1

    def _tokenized(self, texts: Iterable[str], documents: Counter[str]) -> Iterator[tuple[str, list[list[int]]]]:
        """Each text with the ids of its lines; texts without a token are counted and left out."""
        for batch in _batches(texts):
            lines_of = [text.splitlines() for text in batch]
            encoded = iter(self._tokenizer.encode([line for lines in lines_of for line in lines]))
            for text, lines in zip(batch, lines_of):
                sentences = [ids for _, ids in zip(lines, encoded) if ids]
                if sentences:
                    yield text, sentences
                else:
                    documents["no_tokens"] += 1

    def _is_heldout(self, text: str) -> bool:
        if not self._rules.heldout_fraction:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self._heldout_key).digest()
        return int.from_bytes(digest, "little") < self._rules.heldout_fraction * 2**64

    def _part(self, seed: int) -> _Part:
        return _Part(self._rules, self._vocabulary, seed)


class _Part:
    """Examples of one corpus while a chunk is worked on."""

    def __init__(self, rules: Rules, vocabulary: Vocabulary, seed: int) -> None:
        self._rules = rules
        self._special = vocabulary.special
        self._dtype = row_dtype(vocabulary.size)
        self._builder = ExampleBuilder(
            rules.seq_len,
            self._special["[CLS]"],
            self._special["[SEP]"],
            rules.single_segment_prob,
            rules.short_target_prob,
            seed,
        )
        self._examples: list[list[int]] = []
        self._counts: Counter[str] = Counter()

    def add(self, text: str, sentences: list[list[int]]) -> None:
        self._counts["text_bytes"] += len(text.encode())
        self._counts["text_tokens"] += sum(map(len, sentences))
        self._examples.extend(self._builder.document(sentences))

    def finish(self) -> Rows:
        rules, special, counts = self._rules, self._special, self._counts
        block = make_rows(self._examples, rules.seq_len, special["[PAD]"], self._dtype, rules.packing)
        counts["examples"] = len(self._examples)
        counts["rows"] = len(block)
        counts["tokens"] = int(np.count_nonzero(block != special["[PAD]"]))
        num_sep = int(np.count_nonzero(block == special["[SEP]"]))
        assert counts["tokens"] == counts["text_tokens"] + counts["examples"] + num_sep, "a token was lost or made up"
        assert np.count_nonzero(block == special["[CLS]"]) == counts["examples"], "[CLS] came from text"
        assert not (block == special["[MASK]"]).any(), "[MASK] came from text"
        return Rows(block, counts)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Groups of texts of some thousand lines: enough to keep calls rare, few enough to keep memory low."""
    batch: list[str] = []
    num_lines = 0
    for text in texts:
        batch.append(text)
        num_lines += text.count("\n") + 1
        if num_lines >= _LINES_PER_CALL:
            yield batch
            batch, num_lines = [], 0
    if batch:
        yield batch
