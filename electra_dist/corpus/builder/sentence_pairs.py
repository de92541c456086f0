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
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

Ids = list[int]
MIN_TARGET = 5  # shortest target length of an example, in tokens
MIN_SEQ_LEN = 8  # shortest rows that a corpus may have
_NO_LIMIT = 1 << 60  # limit of segment A, in tokens, if it takes all sentences


class ExampleBuilder:
    """Builder of ELECTRA training examples `[CLS] A [SEP] B [SEP]` from consecutive documents (one chunk of a corpus).

    All these documents share one random generator, so the examples of a document depend on the documents before it.
    """

    def __init__(
        self, seq_len: int, cls_id: int, sep_id: int, single_segment_prob: float, short_target_prob: float, seed: int
    ) -> None:
        """Begin with a target length of `seq_len`. The two probabilities are 0.1 and 0.05 in the ELECTRA reference."""
        assert seq_len >= MIN_SEQ_LEN
        self._seq_len = seq_len
        self._cls = [cls_id]
        self._sep = [sep_id]
        self._single_segment_prob = single_segment_prob
        self._short_target_prob = short_target_prob
        self._random = random.Random(seed)
        self._target = seq_len  # tokens at which the accumulated sentences make an example
        self._sentences: list[Ids] = []  # accumulated for the next example
        self._length = 0  # tokens in _sentences

    def document(self, sentences: Iterable[Sequence[int]]) -> Iterator[Ids]:
        """Yield the examples of one document, each of 3 to seq_len ids; a sentence is the token ids of one line."""
        for sentence in sentences:
            for piece in self._pieces(list(sentence)):
                self._add(piece)
                # One piece may be enough for several examples, because the target length may be as short as 5.
                while self._length >= self._target:
                    yield self._make_example()
        while self._length > 0:  # the end of the document, which may be shorter than the target length
            yield self._make_example()

    def _pieces(self, sentence: Ids) -> list[Ids]:
        """Return [sentence] or, if it is too long for one example, the sentence cut into pieces of half an example."""
        longest_alone = self._seq_len - 2  # with [CLS] and one [SEP]
        if len(sentence) <= longest_alone:
            return [sentence]
        piece_length = (self._seq_len - 3) // 2  # half of an example without [CLS] and two [SEP]
        return [sentence[start : start + piece_length] for start in range(0, len(sentence), piece_length)]

    def _add(self, sentence: Ids) -> None:
        if sentence:
            self._sentences.append(sentence)
            self._length += len(sentence)

    def _make_example(self) -> Ids:
        """Make an example of the accumulated sentences. Keep tokens that do not fit, and draw a new target length."""
        first, second = self._divide_into_segments()

        # Cut each segment at the room that it has in the example.
        room_first = self._seq_len - 2  # without [CLS] and one [SEP]
        used_first = min(len(first), room_first)
        room_second = max(0, self._seq_len - 3 - used_first)  # without [CLS], segment A and two [SEP]
        segment_a = first[:room_first]
        segment_b = second[:room_second]
        carried = first[room_first:] + second[room_second:]

        # Begin the next example.
        self._sentences = []
        self._length = 0
        self._add(carried)
        self._draw_target()

        example = self._cls + segment_a + self._sep
        if segment_b:
            example = example + segment_b + self._sep
        return example

    def _divide_into_segments(self) -> tuple[Ids, Ids]:
        """Divide the accumulated sentences into segments A and B, and return the ids of each segment.

        For example, with a target of 13 tokens the limit of A is (13 - 3) // 2 = 5: of sentences of 4, 3 and 6 tokens,
        A takes the first; the second crosses the limit, so a random draw decides; B takes the third.
        """
        limit_of_a = (self._target - 3) // 2  # half of the tokens beside [CLS] and two [SEP]
        if self._random.random() < self._single_segment_prob:
            limit_of_a = _NO_LIMIT
        segment_a: Ids = []
        segment_b: Ids = []
        for sentence in self._sentences:
            if not segment_a or len(segment_a) + len(sentence) < limit_of_a:
                goes_to_a = True
            elif not segment_b and len(segment_a) < limit_of_a:
                goes_to_a = self._random.random() < 0.5  # the first sentence that crosses the limit of A
            else:
                goes_to_a = False
            if goes_to_a:
                segment_a += sentence
            else:
                segment_b += sentence
        return segment_a, segment_b

    def _draw_target(self) -> None:
        self._target = self._seq_len
        if self._random.random() < self._short_target_prob:
            num_targets = self._seq_len - MIN_TARGET + 1
            self._target = MIN_TARGET + int(self._random.random() * num_targets)
