"""The builder of ELECTRA's examples against an independent transcription of the reference's rules."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.corpus.builder.examples import ExampleBuilder

CLS = -1
SEP = -2


def example_builder(
    seq_len: int, seed: int, single_segment_prob: float = 0.1, short_target_prob: float = 0.05
) -> ExampleBuilder:
    """Return a builder with the reference's probabilities and the ids CLS and SEP."""
    return ExampleBuilder(seq_len, CLS, SEP, single_segment_prob, short_target_prob, seed)


class ReferenceBuilder:
    """The rules of class ExampleBuilder in google-research/electra, with the two that docs/corpus.md adds.

    It shares no state with the code under test: it has a random generator of its own with the same seed, and it keeps
    the sentences that are left over by itself.
    """

    def __init__(self, seq_len: int, seed: int, single_segment_prob: float, short_target_prob: float) -> None:
        self.seq_len = seq_len
        self.target = seq_len
        self.random = random.Random(seed)
        self.single_segment_prob = single_segment_prob
        self.short_target_prob = short_target_prob

    def examples(self, document: list[list[int]]) -> list[list[int]]:
        """Return all examples of a document."""
        waiting = [part for sentence in document for part in self.parts(sentence) if part]
        examples = []
        sentences: list[list[int]] = []
        while waiting or sentences:
            while waiting and sum(len(sentence) for sentence in sentences) < self.target:
                sentences.append(waiting.pop(0))
            segment_a, segment_b = self.segments(sentences)

            # The reference drops what it cuts off; here that is the first sentence of the next example.
            room_a = self.seq_len - 2
            room_b = max(0, self.seq_len - 3 - len(segment_a[:room_a]))
            rest = segment_a[room_a:] + segment_b[room_b:]
            sentences = [rest] if rest else []
            example = [CLS, *segment_a[:room_a], SEP]
            if segment_b[:room_b]:
                example += [*segment_b[:room_b], SEP]
            examples.append(example)

            # A share of the targets is short: uniform over the integers from 5 to seq_len, both included.
            self.target = self.seq_len
            if self.random.random() < self.short_target_prob:
                self.target = 5 + int(self.random.random() * (self.seq_len - 4))
        return examples

    def parts(self, sentence: list[int]) -> list[list[int]]:
        """Return the sentence, cut into halves of an example if it could not fit even alone."""
        if len(sentence) <= self.seq_len - 2:
            return [sentence]
        half = (self.seq_len - 3) // 2
        return [sentence[start : start + half] for start in range(0, len(sentence), half)]

    def segments(self, sentences: list[list[int]]) -> tuple[list[int], list[int]]:
        """Divide the sentences into two segments."""
        limit_of_a = (self.target - 3) // 2
        if self.random.random() < self.single_segment_prob:
            limit_of_a = 100_000
        segment_a: list[int] = []
        segment_b: list[int] = []
        for sentence in sentences:
            goes_to_a = len(segment_a) == 0 or len(segment_a) + len(sentence) < limit_of_a
            if not goes_to_a and len(segment_b) == 0 and len(segment_a) < limit_of_a:
                goes_to_a = self.random.random() < 0.5
            if goes_to_a:
                segment_a += sentence
            else:
                segment_b += sentence
        return segment_a, segment_b


def document_of_distinct_ids(lengths: list[int]) -> list[list[int]]:
    """Return sentences of the given lengths; no id occurs twice."""
    ids = itertools.count()
    return [[next(ids) for _ in range(length)] for length in lengths]


@given(
    documents=st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=40), min_size=1, max_size=8),
    seq_len=st.integers(8, 80),
    seed=st.integers(0, 2**63),
    single=st.sampled_from([0.1, 0.5]),
    short=st.sampled_from([0.05, 0.5]),
)
@settings(max_examples=100, deadline=None)
def test_all_examples_equal_those_of_a_builder_by_the_references_rules(
    documents: list[list[int]], seq_len: int, seed: int, single: float, short: float
) -> None:
    """Draw for draw over all documents of a chunk. `documents` holds the lengths of each document's sentences."""
    builder = example_builder(seq_len, seed, single, short)
    reference = ReferenceBuilder(seq_len, seed, single, short)
    for lengths in documents:
        document = document_of_distinct_ids(lengths)

        assert list(builder.document(document)) == reference.examples(document)


def tokens_until_an_example(builder: ExampleBuilder) -> int:
    """Return how many tokens, each a sentence of its own, a builder reads until it makes an example."""
    tokens = itertools.count()
    next(builder.document([next(tokens)] for _ in itertools.count()))
    return next(tokens)


def test_short_targets_are_uniform_from_5_to_the_row_length_both_included() -> None:
    """With sentences of one token, an example is made at exactly its target. Rows of 8 have the 4 targets 5 to 8."""
    targets = Counter()
    for seed in range(2000):
        builder = example_builder(8, seed, single_segment_prob=1.0, short_target_prob=1.0)
        list(builder.document([[1]]))  # the first target is always the row length; the end of this document uses it up
        targets[tokens_until_an_example(builder)] += 1

    assert sorted(targets) == [5, 6, 7, 8]
    # Four standard deviations of a count of 2000 draws of probability 1/4 are 77.
    assert all(abs(count - 500) < 78 for count in targets.values())


@given(
    documents=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=20), min_size=1, max_size=6),
    seq_len=st.integers(8, 80),
    seed=st.integers(0, 2**63),
    short=st.floats(0, 0.9),
)
@settings(max_examples=100, deadline=None)
def test_examples_hold_every_token_of_their_document_exactly_once(
    documents: list[list[int]], seq_len: int, seed: int, short: float
) -> None:
    """Sentences may be empty or longer than a row. `documents` holds the lengths of each document's sentences."""
    builder = example_builder(seq_len, seed, short_target_prob=short)
    for lengths in documents:
        document = document_of_distinct_ids(lengths)

        examples = list(builder.document(document))

        counts = Counter(itertools.chain.from_iterable(examples))
        num_cls = counts.pop(CLS, 0)
        counts.pop(SEP, 0)
        assert num_cls == len(examples)
        assert counts == Counter(itertools.chain.from_iterable(document))
        for example in examples:
            assert example[0] == CLS
            assert CLS not in example[1:]
            assert example[-1] == SEP
            assert example.count(SEP) in (1, 2)
            assert 3 <= len(example) <= seq_len
            assert (SEP, SEP) not in itertools.pairwise(example), "an empty segment"


def test_a_paragraph_on_one_line_makes_full_examples_of_which_nine_in_ten_have_two_segments() -> None:
    """A line of 5,000 tokens is cut into pieces, so that it makes pairs; the last example of each may be short."""
    seq_len = 64
    document = document_of_distinct_ids([5000])
    examples = []
    for seed in range(40):
        examples_of_seed = list(example_builder(seq_len, seed, short_target_prob=0.0).document(document))
        examples += examples_of_seed[:-1]

    num_pairs = sum(example.count(SEP) == 2 for example in examples)
    num_tokens = sum(len(example) for example in examples)

    assert num_pairs == pytest.approx(0.9 * len(examples), rel=0.03)
    assert num_tokens > 0.98 * seq_len * len(examples)


def test_one_example_in_ten_has_one_segment_and_one_target_in_twenty_is_short() -> None:
    """The probabilities are the reference's, 0.1 and 0.05.

    Short targets are uniform over the 124 lengths from 5 to 128, of which 115 are below 120. An example may exceed its
    target by a part of a sentence; the tolerance allows for it.
    """
    builder = example_builder(128, seed=1)
    document = document_of_distinct_ids([12] * 40_000)

    examples = list(builder.document(document))

    num_single = sum(example.count(SEP) == 1 for example in examples)
    num_short = sum(len(example) < 120 for example in examples)
    assert num_single / len(examples) == pytest.approx(0.1, abs=0.02)
    assert num_short / len(examples) == pytest.approx(0.05 * 115 / 124, abs=0.015)


def test_two_builders_with_one_seed_make_the_same_examples_and_another_seed_makes_others() -> None:
    documents = [document_of_distinct_ids([9, 30, 4] * 30) for _ in range(5)]
    builder = example_builder(64, seed=5)
    builder_of_same_seed = example_builder(64, seed=5)
    builder_of_other_seed = example_builder(64, seed=6)

    examples = [list(builder.document(document)) for document in documents]
    examples_of_same_seed = [list(builder_of_same_seed.document(document)) for document in documents]
    examples_of_other_seed = [list(builder_of_other_seed.document(document)) for document in documents]

    assert examples == examples_of_same_seed
    assert examples != examples_of_other_seed
