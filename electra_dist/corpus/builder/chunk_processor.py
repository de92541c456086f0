"""Turn a chunk of documents into rows of token ids; any process may process any chunk, in any order.

A chunk is a group of consecutive documents of the corpus's order. The documents become examples,
[CLS] A [SEP] B [SEP], and one or more examples fill a row of seq_len ids.

Guarantee: the rows depend on the chunk and the request alone. Every document of the chunk is counted once: as used,
held out or one kind of skipped. Every token of a used or held-out document is in exactly one row.

How: a chunk's seeds follow from its place in the corpus (`worker_stages.py`), so the number of workers cannot
change the rows. Examples of different chunks never share a row.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.examples import ExampleBuilder, make_rows, row_dtype
from electra_dist.corpus.counts import SHAPE, Counts, measure, skipped_documents
from electra_dist.corpus.inputs.text_decoding import DocumentNames, RawDocument, SkippedDocument, decode_counted
from electra_dist.tokenizer import new_tokenizer

Item = TypeVar("Item")

_LINES_PER_CALL = 2048  # least number of lines in a call of the tokenizer, except in the last one of a chunk


class Rows(NamedTuple):
    """Rows that one chunk of documents gives to one of two corpora, the training or the held-out one."""

    block: np.ndarray  # [rows, seq_len], uint16 or uint32
    places: np.ndarray  # int64 [examples, 3]: row, position of the first token, index of the document in the chunk


class ChunkRows(NamedTuple):
    """Rows of token ids that one chunk (some MB of documents) gives to the training and to the held-out corpus."""

    train: Rows
    heldout: Rows
    counts: Counts
    # Index of a decoded document in the chunk -> the id and the source that its own record gives it.
    names: dict[int, DocumentNames]


class _Text(NamedTuple):
    index_in_chunk: int
    text: str
    document: RawDocument


class ChunkProcessor:
    """Converter of documents, a chunk of some MB at a time, to rows of token ids. It caches the ids of known words."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._tokenizer = new_tokenizer(request.vocabulary, request.corpus.lowercase)
        self._unk_id = request.vocabulary.special["[UNK]"]
        self._heldout_key = request.heldout_key.to_bytes(8, "little")

    def process(self, documents: Sequence[RawDocument], seed: int, heldout_seed: int) -> ChunkRows:
        """Return the rows of a chunk of documents, separately for training and held-out documents.

        `seed` and `heldout_seed` key the random draws for the examples of training and of held-out documents. The
        result does not depend on chunks that were processed before. An AssertionError means a bug: a document was not
        counted exactly once, or a token was lost.
        """
        counts = Counts()
        train = _RowCollector(self._request, seed)
        heldout = _RowCollector(self._request, heldout_seed)
        names: dict[int, DocumentNames] = {}
        texts = self._decoded(documents, counts, names)
        for text, sentences in self._tokenized(texts, counts):
            is_heldout = self._is_heldout(text.text)
            outcome = "heldout" if is_heldout else "used"
            counts.keep_document(self._source_of(text.document), outcome, sentences, self._unk_id)
            if is_heldout:
                heldout.add(text.index_in_chunk, text.text, sentences)
            else:
                train.add(text.index_in_chunk, text.text, sentences)
        outcomes = counts.all_sources()
        num_counted = outcomes["used"] + outcomes["heldout"] + skipped_documents(outcomes)
        assert outcomes["documents"] == len(documents), "a document was not read"
        assert outcomes["documents"] == num_counted, "a document was not counted once"
        train_rows, counts.rows["train"] = train.finish()
        heldout_rows, counts.rows["heldout"] = heldout.finish()
        return ChunkRows(train_rows, heldout_rows, counts, names)

    def _skip(self, document: RawDocument, kind: str, counts: Counts) -> None:
        file = self._request.inputs[document.file]
        counts.skip_document(file.source, file.given_path, kind, document.size)

    def _source_of(self, document: RawDocument) -> str:
        return self._request.inputs[document.file].source

    def _decoded(
        self, documents: Iterable[RawDocument], counts: Counts, names: dict[int, DocumentNames]
    ) -> Iterator[_Text]:
        """Yield the usable texts of a chunk's documents.

        Adds to `counts` whether each document is usable, and to `names` the id and source in the record of each usable
        one.
        """
        request = self._request
        for index, document in enumerate(documents):
            source = self._source_of(document)
            numbers = counts.of_source(source)
            numbers["documents"] += 1
            numbers["bytes"] += document.size
            try:
                decoded = decode_counted(document, request.text_field, request.corpus.undecodable)
            except SkippedDocument as skipped:
                self._skip(document, skipped.kind, counts)
                counts.other_fields.update(skipped.other_fields)
                counts.add_undecodable(source, skipped.undecodable_bytes)
                continue
            counts.add_undecodable(source, decoded.replaced_bytes)
            names[index] = decoded.names
            numbers.update({SHAPE + name: number for name, number in measure(decoded.text).items()})
            yield _Text(index, decoded.text, document)

    def _tokenized(self, texts: Iterable[_Text], counts: Counts) -> Iterator[tuple[_Text, list[list[int]]]]:
        """Yield each text with the token ids of its non-empty lines; count a text without tokens as "no_tokens".

        One call of the tokenizer encodes the lines of many texts, because that is faster than a call for each text.
        """
        for batch in in_groups(texts, lambda text: text.text.count("\n") + 1, _LINES_PER_CALL):
            lines_of_texts = [self._tokenizer.split_lines(text.text) for text in batch]
            all_lines = [line for lines in lines_of_texts for line in lines]
            ids_of_all_lines = self._tokenizer.encode(all_lines)
            start = 0  # index in `ids_of_all_lines` of the first line of the text
            for text, lines in zip(batch, lines_of_texts):
                end = start + len(lines)
                sentences = [ids for ids in ids_of_all_lines[start:end] if ids]
                start = end
                if sentences:
                    yield text, sentences
                else:
                    self._skip(text.document, "no_tokens", counts)

    def _is_heldout(self, text: str) -> bool:
        """Return whether a text is held out; a keyed hash of it decides, so that equal texts go to the same corpus."""
        heldout_fraction = self._request.corpus.heldout_fraction
        if heldout_fraction == 0:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self._heldout_key).digest()
        text_hash = int.from_bytes(digest, "little")
        return text_hash < heldout_fraction * 2**64


class _RowCollector:
    """Collector of a chunk's training or held-out examples: call `add` for each document, then `finish` once."""

    def __init__(self, request: BuildRequest, seed: int) -> None:
        self._request = request
        self._special = request.vocabulary.special
        self._builder = ExampleBuilder(
            seq_len=request.seq_len,
            cls_id=self._special["[CLS]"],
            sep_id=self._special["[SEP]"],
            single_segment_prob=request.corpus.single_segment_prob,
            short_target_prob=request.corpus.short_target_prob,
            seed=seed,
        )
        self._examples: list[list[int]] = []
        self._document_of_example: list[int] = []  # index of each example's document in the chunk
        self._counts: Counter[str] = Counter()

    def add(self, index: int, text: str, sentences: list[list[int]]) -> None:
        """Make examples of a document. `index` is its place in the chunk; a sentence is the token ids of one line."""
        self._counts["text_bytes"] += len(text.encode())
        self._counts["text_tokens"] += sum(map(len, sentences))
        self._examples.extend(self._builder.document(sentences))
        num_new_examples = len(self._examples) - len(self._document_of_example)
        self._document_of_example += [index] * num_new_examples

    def finish(self) -> tuple[Rows, Counter[str]]:
        """Pack the examples of all added documents into rows, and return the rows with their counts."""
        pad_id = self._special["[PAD]"]
        dtype = row_dtype(self._request.vocabulary.size)
        packing = self._request.corpus.packing
        block, places = make_rows(self._examples, self._request.seq_len, pad_id, dtype, packing)
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
        return Rows(block, places), counts


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Yield consecutive items in groups whose sizes add up to `least` or more; only the last group may have less."""
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= least:
            yield group
            group = []
            size = 0
    if group:
        yield group
