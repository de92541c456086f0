"""Build examples `[CLS] A [SEP] B [SEP]` of documents by the rules of the ELECTRA reference, and pack them into rows.

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

Packing: an example has at most seq_len ids; a row, which is what the model gets as one sequence, has exactly seq_len.
Every example is whole in one row, once, with its ids unchanged; [PAD] occurs only at the end of a row. The examples'
lengths and order alone decide which examples share a row. The packing "rows" works by best fit decreasing: it takes
the longest example first, and puts each example into the row with the least free space that is still enough for it.
The packing "none" gives each example a row of its own, as in the paper. In both, the rows are in the order of their
first example.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

Ids = list[int]
MIN_TARGET = 5  # shortest target length of an example, in tokens
MIN_SEQ_LEN = 8  # shortest rows that a corpus may have
_NO_LIMIT = 1 << 60  # limit of segment A, in tokens, if it takes all sentences


class ExampleBuilder:
    """Divider of consecutive documents into ELECTRA's training examples, `[CLS] A [SEP] B [SEP]` of token ids.

    All documents given to an instance share one random generator, so the examples of a document depend on the
    documents before it.
    """

    def __init__(
        self, seq_len: int, cls_id: int, sep_id: int, single_segment_prob: float, short_target_prob: float, seed: int
    ) -> None:
        """Begin with a target length of `seq_len`. In the ELECTRA reference the two probabilities are 0.1 and 0.05."""
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
        """Make an example of the collected sentences, keep tokens that do not fit, and draw the next target length."""
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
        """Divide the collected sentences into segments A and B at random, and return the token ids of each segment.

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


def row_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that holds all ids of a vocabulary: uint16 up to 65,536 entries, uint32 for more."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def make_rows(
    examples: Sequence[Sequence[int]],
    seq_len: int,
    pad_id: int,
    dtype: type[np.uint16] | type[np.uint32],
    packing: Literal["rows", "none"],
) -> tuple[np.ndarray, np.ndarray]:
    """Pack examples (lists of token ids) into rows; return the rows, [num_rows, seq_len], and the examples' places.

    `packing` "rows" puts as many examples into a row as fit, "none" only one. `dtype` must hold every id. The places
    are int64 [examples, 3]: row, position of the first token in the row, index of the example; they are ordered by
    row, and within a row from left to right.
    """
    if packing == "rows":
        groups = pack([len(example) for example in examples], seq_len)
    else:
        groups = [[index] for index in range(len(examples))]
    rows = np.full((len(groups), seq_len), pad_id, dtype)
    places = []
    for row, group in enumerate(groups):
        start = 0
        for index in group:
            end = start + len(examples[index])
            rows[row, start:end] = examples[index]
            places.append((row, start, index))
            start = end
    return rows, np.array(places, np.int64).reshape(-1, 3)


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Group examples so that each group fits a row, by best fit decreasing; return groups of indices into `lengths`.

    For example, lengths [6, 5, 4, 3] in rows of 10 give [[0, 2], [1, 3]]: 6 and 5 begin groups with 4 and 5 ids of
    free space, 4 fills the first group, and 3 goes to the second. The indices of a group ascend; the groups are in the
    order of their first index. Each example takes constant time, because a bit set of the free spaces finds the best
    group.
    """
    groups: list[list[int]] = []
    groups_with_space: list[list[int]] = [[] for _ in range(seq_len + 1)]  # free space -> numbers of groups
    space_bits = 0  # set of free spaces: bit s is 1 if groups_with_space[s] is not empty
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in longest_first:
        length = lengths[index]
        # Shifting out the bits below `length` leaves the spaces that hold the example; bit 0 now stands for `length`.
        fitting_bits = space_bits >> length
        if fitting_bits:
            # The lowest bit is the least sufficient space. Take a group with this space out of its list.
            lowest_bit = fitting_bits & -fitting_bits
            space = length + (lowest_bit.bit_length() - 1)
            group_number = groups_with_space[space].pop()
            if not groups_with_space[space]:
                space_bits ^= 1 << space
        else:
            # No group holds the example: begin one.
            space = seq_len
            group_number = len(groups)
            groups.append([])
        # Place the example, and file the group under the space that is left.
        groups[group_number].append(index)
        space_left = space - length
        groups_with_space[space_left].append(group_number)
        space_bits |= 1 << space_left

    # Restore the order of the text: within a group, and of the groups by their first example.
    for group in groups:
        group.sort()
    groups.sort(key=lambda group: group[0])
    return groups
