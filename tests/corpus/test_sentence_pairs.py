"""The example builder against a transcription of the reference's rules, and what it must conserve."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.corpus.sentence_pairs import ExampleBuilder

CLS, SEP = -1, -2


def builder(seq_len: int, seed: int, single: float = 0.1, short: float = 0.05) -> ExampleBuilder:
    return ExampleBuilder(seq_len, CLS, SEP, single, short, seed)


class Reference:
    """ELECTRA's ExampleBuilder, from its description: list of sentences in, truncated examples out."""

    def __init__(self, seq_len: int, seed: int) -> None:
        self.seq_len, self.target, self.random = seq_len, seq_len, random.Random(seed)

    def first_example(self, sentences: list[list[int]]) -> list[int]:
        taken: list[list[int]] = []
        for sentence in sentences:
            taken.append(sentence)
            if sum(map(len, taken)) >= self.target:
                break
        wanted = 100_000 if self.random.random() < 0.1 else (self.target - 3) // 2
        a: list[int] = []
        b: list[int] = []
        for sentence in taken:
            goes_to_a = len(a) == 0 or len(a) + len(sentence) < wanted
            if not goes_to_a and len(b) == 0 and len(a) < wanted:
                goes_to_a = self.random.random() < 0.5
            if goes_to_a:
                a += sentence
            else:
                b += sentence
        a = a[: self.seq_len - 2]
        b = b[: max(0, self.seq_len - len(a) - 3)]
        if self.random.random() < 0.05:
            self.target = 5 + int(self.random.random() * (self.seq_len - 4))
        else:
            self.target = self.seq_len
        return [CLS, *a, SEP, *([*b, SEP] if b else [])]


def numbered(lengths: list[int]) -> list[list[int]]:
    """Sentences of distinct ids."""
    ids = iter(range(10**9))
    return [[next(ids) for _ in range(length)] for length in lengths]


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@given(documents=st.lists(lengths, min_size=1, max_size=12), seq_len=st.integers(32, 80), seed=st.integers(0, 2**63))
@settings(max_examples=100, deadline=None)
def test_first_example_of_each_document_is_the_references(documents: list[list[int]], seq_len: int, seed: int) -> None:
    ours, reference = builder(seq_len, seed), Reference(seq_len, seed)
    for document in documents:
        sentences = numbered(document)
        examples = list(ours.document(sentences))
        assert examples[0] == reference.first_example(sentences)
        # later examples draw as well: let the reference's generator and target follow
        reference.random.setstate(ours._random.getstate())
        reference.target = ours._target


@given(
    documents=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=20), min_size=1, max_size=6),
    seq_len=st.integers(8, 80),
    seed=st.integers(0, 2**63),
    short=st.floats(0, 0.9),
)
@settings(max_examples=100, deadline=None)
def test_no_token_is_lost_or_made(documents: list[list[int]], seq_len: int, seed: int, short: float) -> None:
    build = builder(seq_len, seed, short=short)
    for document in documents:
        sentences = numbered(document)
        examples = list(build.document(sentences))
        words = Counter(token for example in examples for token in example)
        assert words.pop(CLS, 0) == len(examples)
        words.pop(SEP, 0)
        assert words == Counter(token for sentence in sentences for token in sentence)
        for example in examples:
            assert example[0] == CLS
            assert CLS not in example[1:]
            assert example[-1] == SEP
            assert example.count(SEP) in (1, 2)
            assert 3 <= len(example) <= seq_len
            assert (SEP, SEP) not in itertools.pairwise(example), "an empty segment"


def test_long_lines_make_pairs() -> None:
    """A paragraph of 5,000 tokens on one line: nine examples in ten have two segments, and all are full."""
    examples = [e for seed in range(40) for e in list(builder(64, seed, short=0.0).document(numbered([5000])))[:-1]]
    pairs = sum(example.count(SEP) == 2 for example in examples)
    assert pairs == pytest.approx(0.9 * len(examples), rel=0.03)
    assert sum(map(len, examples)) > 0.98 * 64 * len(examples)


def test_one_example_in_ten_has_one_segment_and_one_target_in_twenty_is_short() -> None:
    build = builder(128, 1)
    examples = list(build.document(numbered([12] * 40_000)))
    single = sum(example.count(SEP) == 1 for example in examples) / len(examples)
    short = sum(len(example) < 120 for example in examples) / len(examples)
    assert single == pytest.approx(0.1, abs=0.02)
    assert short == pytest.approx(0.05 * 115 / 124, abs=0.015)


def test_a_builder_depends_on_its_seed_alone() -> None:
    documents = [numbered([9, 30, 4] * 30) for _ in range(5)]
    runs = [[list(b.document(d)) for d in documents] for b in (builder(64, 5), builder(64, 5), builder(64, 6))]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
