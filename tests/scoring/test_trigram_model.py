"""The trigram model against a definition with dictionaries, and on text whose order is known."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from electra_dist.scoring.trigram_model import TrigramModel

CLS, SEP, PAD, SIZE = 1, 2, 0, 12
DISCOUNT = 0.75


def rows_of(seed: int, num_rows: int) -> np.ndarray:
    """Return rows [CLS] tokens [SEP] with padding, in which the next token often is the last one plus 1."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((num_rows, 20), np.uint16)
    for row in rows:
        length = rng.integers(6, 20)
        tokens = [int(rng.integers(3, SIZE))]
        while len(tokens) < length - 2:
            is_next = rng.random() < 0.7 and tokens[-1] + 1 < SIZE
            tokens.append(tokens[-1] + 1 if is_next else int(rng.integers(3, SIZE)))
        row[:length] = [CLS, *tokens, SEP]
    return rows


def probability_by_definition(rows: np.ndarray, first: int, second: int, third: int) -> float:
    """Interpolated Kneser-Ney with one discount, from sets of trigrams and bigrams."""
    trigrams: Counter[tuple[int, ...]] = Counter()
    for row in rows.tolist():
        text = [CLS, *(token for token in row if token != PAD)]
        trigrams.update(zip(text, text[1:], text[2:]))
    bigrams = Counter((v, w) for _, v, w in trigrams)
    tokens = Counter(w for _, w in bigrams)
    lowest = (tokens[third] + 0.5) / (sum(tokens.values()) + 0.5 * SIZE)

    def interpolated(counts: Counter[tuple[int, ...]], context: tuple[int, ...], lower: float) -> float:
        of_context = {key[-1]: count for key, count in counts.items() if key[:-1] == context}
        total = sum(of_context.values())
        if total == 0:
            return lower
        return (max(of_context.get(third, 0) - DISCOUNT, 0) + DISCOUNT * len(of_context) * lower) / total

    return interpolated(trigrams, (first, second), interpolated(bigrams, (second,), lowest))


def test_probabilities_are_those_of_the_definition_and_sum_to_one() -> None:
    rows = rows_of(0, 30)
    model = TrigramModel([rows[:11], rows[11:]], SIZE, CLS, PAD)
    row = [CLS, 5, 6, 11, 3, 10, SEP]

    expected = [math.log(probability_by_definition(rows, *trigram)) for trigram in zip([CLS, *row], row, row[1:])]

    assert model.log_probs(row).tolist() == pytest.approx(expected, abs=1e-5)
    assert [len(values) for values in model.score([row])] == [len(row) - 2]
    total = sum(math.exp(model.log_probs([CLS, 5, 6, token])[-1]) for token in range(SIZE))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_text_in_order_is_more_probable_than_the_same_tokens_in_another_order() -> None:
    model = TrigramModel([rows_of(1, 400)], SIZE, CLS, PAD)

    in_order, other = (float(values.sum()) for values in model.score([[CLS, 4, 5, 6, 7, SEP], [CLS, 6, 4, 7, 5, SEP]]))

    assert in_order > other + 3


def test_the_divergence_is_nearly_zero_for_rows_of_the_same_kind_and_large_for_other_tokens() -> None:
    model = TrigramModel([rows_of(2, 2000)], SIZE, CLS, PAD)

    assert 0 <= model.divergence_of([rows_of(3, 2000)], PAD) < 0.001
    assert model.divergence_of([np.array([[CLS, 3, 3, 3, SEP, PAD]])], PAD) > 0.5
