"""Sentences of a document -> examples `[CLS] A [SEP] B [SEP]`, as ELECTRA's build_pretraining_dataset.py makes them.

The rules of the reference (its class ExampleBuilder), each kept with its order of random draws:
a line is a sentence; sentences accumulate until the target length is reached or the document ends, then they make one
example. With probability 0.1 all go to one segment; else A takes sentences up to (target - 3) // 2 tokens, a sentence
that crosses this limit goes to A with p = 0.5 (if B is still empty), the rest goes to B. The next target length is
seq_len, or with probability 0.05 uniform in [5, seq_len].

One difference, because the reference loses tokens (three or more of every full example): what does not fit an example
is *carried* into the next one of its document, where the reference drops it. And a line that could not fit even alone
(more than seq_len - 2 tokens: a paragraph of prose when rows are short) is first cut into pieces of
(seq_len - 3) // 2 tokens, one segment each, so that long lines make pairs too. So the first example of a document is
the reference's, draw for draw; later ones begin with what was carried; no token is ever lost.

Randomness: one generator per chunk of documents, seeded by the caller; `random.Random.random()` only, whose sequence
Python promises to keep. Cost: 0.1 s for a million tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

Ids = list[int]
MIN_TARGET = 5
MIN_SEQ_LEN = 8
_NO_LIMIT = 1 << 60


class ExampleBuilder:
    """Builds the examples of a chunk of documents; feed it one document after another."""

    def __init__(
        self, seq_len: int, cls_id: int, sep_id: int, single_segment_prob: float, short_target_prob: float, seed: int
    ) -> None:
        """Starts with a full-length target; `seq_len` bounds an example with its special tokens."""
        assert seq_len >= MIN_SEQ_LEN
        self._seq_len = seq_len
        self._cls = [cls_id]
        self._sep = [sep_id]
        self._single_segment_prob = single_segment_prob
        self._short_target_prob = short_target_prob
        self._random = random.Random(seed)
        self._target = seq_len
        self._sentences: list[Ids] = []
        self._length = 0

    def document(self, sentences: Iterable[Sequence[int]]) -> Iterator[Ids]:
        """The examples of one document, each 3 to seq_len ids. Together they hold every id of `sentences` once."""
        for sentence in sentences:
            for piece in self._pieces(list(sentence)):
                self._add(piece)
                while self._length >= self._target:
                    yield self._make_example()
        while self._length:
            yield self._make_example()

    def _pieces(self, sentence: Ids) -> list[Ids]:
        if len(sentence) <= self._seq_len - 2:
            return [sentence]
        size = (self._seq_len - 3) // 2
        return [sentence[start : start + size] for start in range(0, len(sentence), size)]

    def _add(self, sentence: Ids) -> None:
        if sentence:
            self._sentences.append(sentence)
            self._length += len(sentence)

    def _make_example(self) -> Ids:
        first, second = self._split()
        room_first = self._seq_len - 2
        room_second = max(0, self._seq_len - 3 - min(len(first), room_first))
        overflow = first[room_first:] + second[room_second:]
        first, second = first[:room_first], second[:room_second]
        self._sentences = []
        self._length = 0
        self._add(overflow)
        self._draw_target()
        example = self._cls + first + self._sep
        return example + second + self._sep if second else example

    def _split(self) -> tuple[Ids, Ids]:
        limit = (self._target - 3) // 2
        if self._random.random() < self._single_segment_prob:
            limit = _NO_LIMIT
        first: Ids = []
        second: Ids = []
        for sentence in self._sentences:
            if (
                not first
                or len(first) + len(sentence) < limit
                or (not second and len(first) < limit and self._random.random() < 0.5)
            ):
                first += sentence
            else:
                second += sentence
        return first, second

    def _draw_target(self) -> None:
        self._target = self._seq_len
        if self._random.random() < self._short_target_prob:
            self._target = MIN_TARGET + int(self._random.random() * (self._seq_len - MIN_TARGET + 1))
