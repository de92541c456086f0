"""Turn a chunk of documents into rows of token ids; any process may process any chunk, in any order.

A chunk is a group of consecutive documents of the corpus's order. The documents become examples,
[CLS] A [SEP] B [SEP], and one or more examples fill a row of seq_len ids.

Guarantee: the rows depend on the chunk and the rules alone. Every document of the chunk is counted once: as used, held
out or one kind of skipped. Every token of a used or held-out document is in exactly one row.

How: a chunk's seeds follow from its place in the corpus (`stages/bucket_rows.py`), so the number of workers cannot
change the rows. Examples of different chunks never share a row. A worker process imports this module, which does not
import torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from electra_dist.corpus.report.document_counts import DocumentCounts, SourceCounts
from electra_dist.corpus.row_packing import fill_rows, group_examples, places_of_examples, row_dtype
from electra_dist.corpus.sentence_pairs import ExampleBuilder
from electra_dist.corpus.text_decoding import (
    SKIPPED_KINDS,
    DocumentNames,
    RawDocument,
    SkippedDocument,
    Undecodable,
    decode_counted,
)
from electra_dist.tokenizer import Vocabulary, new_tokenizer

_LINES_PER_CALL = 2048  # lines in one call of the tokenizer


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Parameters that decide which rows a chunk of documents becomes; every worker process gets the same ones."""

    vocabulary_text: str  # the text of vocab.txt
    lowercase: bool  # lower-case the text and strip its accents
    seq_len: int  # tokens of a row
    packing: Literal["rows", "none"]  # rows: as many examples in a row as fit; none: one example in each row
    single_segment_prob: float  # probability that an example has one segment only
    short_target_prob: float  # probability that the target length of an example is drawn from [5, seq_len]
    heldout_fraction: float  # share of the documents that go to the held-out corpus
    heldout_key: int  # 64-bit key of the hash that chooses held-out documents
    text_field: str  # field of a JSON line that holds the text
    undecodable: Undecodable  # what happens to a document with bytes that are not UTF-8


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of the shuffled corpus, which become rows together, and the seeds for their examples."""

    documents: list[RawDocument]
    seed: int  # of the random draws for the examples of its training documents
    heldout_seed: int  # of the random draws for the examples of its held-out documents


@dataclass
class Rows:
    """Rows that one chunk of documents gives to one corpus, the training or the held-out one, and their counts."""

    block: np.ndarray  # [rows, seq_len], uint16 or uint32
    places: np.ndarray  # int64 [examples, 3]: row, position of the first token, index of the document in the chunk
    counts: Counter[str] = field(default_factory=Counter)  # text_bytes, text_tokens, examples, rows, tokens


@dataclass
class ChunkRows:
    """Training and held-out rows of one chunk of documents, and how many documents were used, held out or skipped."""

    train: Rows
    heldout: Rows
    documents: Counter[str]  # documents by outcome: in (all), used, heldout and each kind of SKIPPED_KINDS
    sources: SourceCounts = field(default_factory=dict)  # counts of the documents of each source for the report
    # Index of a decoded document in the chunk -> the id and the source that its own record gives it.
    names: dict[int, DocumentNames] = field(default_factory=dict)


class _Text(NamedTuple):
    index_in_chunk: int
    text: str
    document_bytes: int  # size of the document before it was decoded
    counts: DocumentCounts  # of the document's source; updated in place


class ChunkProcessor:
    """Converter of chunks of documents to rows of token ids. A process keeps one, because it caches known words."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._vocabulary = Vocabulary(rules.vocabulary_text, "vocab.txt")
        self._tokenizer = new_tokenizer(self._vocabulary, rules.lowercase)
        self._unk_id = self._vocabulary.special["[UNK]"]
        self._heldout_key = rules.heldout_key.to_bytes(8, "little")

    def process(self, chunk: Chunk) -> ChunkRows:
        """Return the rows of a chunk of documents, separately for training and held-out documents.

        The result does not depend on chunks that were processed before. An AssertionError means a bug: a document was
        not counted exactly once, or a token was lost.
        """
        outcomes: Counter[str] = Counter()  # documents by outcome; `_decoded` and `_tokenized` count what they skip
        sources: SourceCounts = {}
        train = _RowCollector(self._rules, self._vocabulary, chunk.seed)
        heldout = _RowCollector(self._rules, self._vocabulary, chunk.heldout_seed)
        names: dict[int, DocumentNames] = {}
        texts = self._decoded(chunk.documents, outcomes, sources, names)
        for document, sentences in self._tokenized(texts, outcomes):
            is_heldout = self._is_heldout(document.text)
            outcome = "heldout" if is_heldout else "used"
            outcomes[outcome] += 1
            document.counts.add_kept(outcome, sentences, self._unk_id)
            if is_heldout:
                heldout.add(document.index_in_chunk, document.text, sentences)
            else:
                train.add(document.index_in_chunk, document.text, sentences)
        num_skipped = sum(outcomes[kind] for kind in SKIPPED_KINDS)
        assert outcomes["in"] == len(chunk.documents), "a document was not read"
        num_counted = outcomes["used"] + outcomes["heldout"] + num_skipped
        assert outcomes["in"] == num_counted, "a document was not counted once"
        return ChunkRows(
            train=train.finish(), heldout=heldout.finish(), documents=outcomes, sources=sources, names=names
        )

    def _decoded(
        self,
        raw_documents: Iterable[RawDocument],
        outcomes: Counter[str],
        sources: SourceCounts,
        names: dict[int, DocumentNames],
    ) -> Iterator[_Text]:
        """Decode documents and yield the usable texts; count all in `outcomes` and `sources`; add ids to `names`."""
        for index, document in enumerate(raw_documents):
            outcomes["in"] += 1
            document_bytes = len(document.data or b"")
            counts = sources.setdefault(document.source, DocumentCounts())
            counts.add_read(document_bytes)
            try:
                decoded = decode_counted(document, self._rules.text_field, self._rules.undecodable)
            except SkippedDocument as skipped:
                outcomes[skipped.kind] += 1
                counts.add_skipped(skipped.kind, document_bytes)
                counts.add_undecodable(skipped.undecodable_bytes)
                continue
            counts.add_undecodable(decoded.replaced_bytes)
            names[index] = decoded.names
            yield _Text(index, decoded.text, document_bytes, counts)

    def _tokenized(self, texts: Iterable[_Text], outcomes: Counter[str]) -> Iterator[tuple[_Text, list[list[int]]]]:
        """Yield each text with the token ids of its non-empty lines; count a text without tokens as "no_tokens".

        One call of the tokenizer encodes the lines of many texts, because that is faster than a call for each text.
        """
        for batch in _batches(texts):
            lines_of_texts = [self._tokenizer.split_lines(document.text) for document in batch]
            all_lines = [line for lines in lines_of_texts for line in lines]
            ids_of_all_lines = self._tokenizer.encode(all_lines)
            start = 0  # index in `ids_of_all_lines` of the first line of the text
            for document, lines in zip(batch, lines_of_texts):
                end = start + len(lines)
                sentences = [ids for ids in ids_of_all_lines[start:end] if ids]
                start = end
                if sentences:
                    yield document, sentences
                else:
                    outcomes["no_tokens"] += 1
                    document.counts.add_skipped("no_tokens", document.document_bytes)

    def _is_heldout(self, text: str) -> bool:
        """Return whether a text is held out; a keyed hash of it decides, so that equal texts go to the same corpus."""
        if self._rules.heldout_fraction == 0:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self._heldout_key).digest()
        text_hash = int.from_bytes(digest, "little")
        return text_hash < self._rules.heldout_fraction * 2**64


class _RowCollector:
    """Collector of a chunk's training or held-out examples: call `add` for each document, then `finish` once."""

    def __init__(self, rules: Rules, vocabulary: Vocabulary, seed: int) -> None:
        self._rules = rules
        self._special = vocabulary.special
        self._dtype = row_dtype(vocabulary.size)
        self._builder = ExampleBuilder(
            seq_len=rules.seq_len,
            cls_id=self._special["[CLS]"],
            sep_id=self._special["[SEP]"],
            single_segment_prob=rules.single_segment_prob,
            short_target_prob=rules.short_target_prob,
            seed=seed,
        )
        self._examples: list[list[int]] = []
        self._document_of_example: list[int] = []  # index of each example's document in the chunk
        self._counts: Counter[str] = Counter()

    def add(self, index: int, text: str, sentences: list[list[int]]) -> None:
        """Add the examples of the document with this index in the chunk; a sentence is the token ids of one line."""
        self._counts["text_bytes"] += len(text.encode())
        self._counts["text_tokens"] += sum(map(len, sentences))
        self._examples.extend(self._builder.document(sentences))
        num_new_examples = len(self._examples) - len(self._document_of_example)
        self._document_of_example += [index] * num_new_examples

    def finish(self) -> Rows:
        """Pack the examples of all added documents into rows, and return the rows with their counts."""
        pad_id = self._special["[PAD]"]
        seq_len = self._rules.seq_len
        lengths = [len(example) for example in self._examples]
        groups = group_examples(lengths, seq_len, self._rules.packing)
        places = places_of_examples(lengths, groups)
        block = fill_rows(self._examples, places, len(groups), seq_len, pad_id, self._dtype)
        counts = self._counts
        counts["examples"] = len(self._examples)
        counts["rows"] = len(block)
        counts["tokens"] = int(np.count_nonzero(block != pad_id))
        # Every token is a token of text, the one [CLS] of its example, or a [SEP].
        num_cls = int(np.count_nonzero(block == self._special["[CLS]"]))
        num_sep = int(np.count_nonzero(block == self._special["[SEP]"]))
        assert counts["tokens"] == counts["text_tokens"] + counts["examples"] + num_sep, "a token was lost or added"
        assert num_cls == counts["examples"], "text was encoded as [CLS]"
        assert not (block == self._special["[MASK]"]).any(), "text was encoded as [MASK]"
        documents = np.array(self._document_of_example, np.int64)
        places[:, 2] = documents[places[:, 2]]  # replaces the index of each example by that of its document
        return Rows(block=block, places=places, counts=counts)


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    """Yield consecutive texts in groups of at least `_LINES_PER_CALL` lines; only the last group may have fewer."""
    batch: list[_Text] = []
    num_lines = 0
    for document in texts:
        batch.append(document)
        num_lines += document.text.count("\n") + 1
        if num_lines >= _LINES_PER_CALL:
            yield batch
            batch = []
            num_lines = 0
    if batch:
        yield batch
