"""Build examples `[CLS] A [SEP] B [SEP]` from the sentences of documents, by the rules of the ELECTRA reference.

The rules are those of class ExampleBuilder in google-research/electra, build_pretraining_dataset.py, each with its
order of random draws:
- A line is a sentence. Sentences accumulate until the target length is reached or the document ends; they then make
  one example.
- With probability 0.1 all of them go to one segment. Otherwise segment A takes sentences up to (target - 3) // 2
  tokens; a sentence that crosses this limit goes to A with probability 0.5 if B is still empty; the rest goes to B.
- The next target length is seq_len, or with probability 0.05 uniform in [5, seq_len].

Two things differ, because the reference loses tokens (three or more of every full example):
- Tokens that do not fit an example are carried into the next example of the document, where the reference drops them.
- A line that could not fit even alone (more than seq_len - 2 tokens: a paragraph of prose when rows are short) is
  first cut into pieces of (seq_len - 3) // 2 tokens, one segment each, so that long lines make pairs, too.
The first example of a document is therefore the reference's, draw for draw; later ones begin with the carried tokens.
No token is ever lost.

Randomness: one generator per chunk of documents, seeded by the caller. Only `random.Random.random()` is used, whose
sequence Python promises to keep.

Cost: 0.1 s for a million tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

Ids = list[int]
MIN_TARGET = 5  # shortest target length of an example, in tokens
MIN_SEQ_LEN = 8  # shortest rows that a corpus may have
_NO_LIMIT = 1 << 60


class ExampleBuilder:
    """Builder of ELECTRA training examples `[CLS] A [SEP] B [SEP]` from tokenized documents.

    Create one builder for each chunk of documents, and call `document` for its documents in order. All documents of a
    chunk share one random generator, so the examples of a document depend on the documents before it.
    """

    def __init__(
        self, seq_len: int, cls_id: int, sep_id: int, single_segment_prob: float, short_target_prob: float, seed: int
    ) -> None:
        """Start with a target length of `seq_len`.

        Args:
            seq_len: most ids of an example, its special tokens included; at least `MIN_SEQ_LEN`.
            cls_id: id of [CLS].
            sep_id: id of [SEP].
            single_segment_prob: probability that an example has segment A only (reference: 0.1).
            short_target_prob: probability of a target length drawn from [5, seq_len] (reference: 0.05).
            seed: of all random draws of this builder.
        """
        assert seq_len >= MIN_SEQ_LEN
        self._seq_len = seq_len
        self._cls = [cls_id]
        self._sep = [sep_id]
        self._single_segment_prob = single_segment_prob
        self._short_target_prob = short_target_prob
        self._random = random.Random(seed)
        self._target = seq_len
        self._sentences: list[Ids] = []
        self._length = 0  # tokens in _sentences

    def document(self, sentences: Iterable[Sequence[int]]) -> Iterator[Ids]:
        """Yield the examples of one document, each of 3 to seq_len ids.

        Together the examples hold every id of `sentences` exactly once, beside [CLS] and [SEP]. Exhaust the iterator
        before the next call, because sentences that remain would be mixed with the next document.

        Args:
            sentences: token ids of each line of the document.
        """
        for sentence in sentences:
            for piece in self._pieces(list(sentence)):
                self._add(piece)
                while self._length >= self._target:
                    yield self._make_example()
        while self._length:
            yield self._make_example()

    def _pieces(self, sentence: Ids) -> list[Ids]:
        """Return [sentence], or its pieces of (seq_len - 3) // 2 ids if the sentence is too long for one example."""
        if len(sentence) <= self._seq_len - 2:
            return [sentence]
        size = (self._seq_len - 3) // 2
        return [sentence[start : start + size] for start in range(0, len(sentence), size)]

    def _add(self, sentence: Ids) -> None:
        """Add a sentence to the sentences of the next example; an empty sentence is ignored."""
        if sentence:
            self._sentences.append(sentence)
            self._length += len(sentence)

    def _make_example(self) -> Ids:
        """Return an example of the accumulated sentences; tokens that do not fit are kept for the next example."""
        first, second = self._split()
        room_first = self._seq_len - 2  # beside [CLS] and [SEP]
        room_second = max(0, self._seq_len - 3 - min(len(first), room_first))  # beside [CLS], A and two [SEP]
        carried = first[room_first:] + second[room_second:]
        first = first[:room_first]
        second = second[:room_second]
        self._sentences = []
        self._length = 0
        self._add(carried)
        self._draw_target()
        example = self._cls + first + self._sep
        if second:
            example = example + second + self._sep
        return example

    def _split(self) -> tuple[Ids, Ids]:
        """Divide the accumulated sentences into segments A and B, and return the ids of each segment.

        Source: class ExampleBuilder of google-research/electra, with the same order of random draws.
        """
        limit = (self._target - 3) // 2
        if self._random.random() < self._single_segment_prob:
            limit = _NO_LIMIT
        first: Ids = []
        second: Ids = []
        for sentence in self._sentences:
            goes_first = not first or len(first) + len(sentence) < limit
            crosses_limit = not goes_first and not second and len(first) < limit
            if crosses_limit:
                goes_first = self._random.random() < 0.5
            if goes_first:
                first += sentence
            else:
                second += sentence
        return first, second

    def _draw_target(self) -> None:
        """Draw the next target length: seq_len, or with probability `short_target_prob` uniform in [5, seq_len]."""
        self._target = self._seq_len
        if self._random.random() < self._short_target_prob:
            self._target = MIN_TARGET + int(self._random.random() * (self._seq_len - MIN_TARGET + 1))
