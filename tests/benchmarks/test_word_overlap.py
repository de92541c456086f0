"""The benchmark of shared words computes the Jaccard index, and its rank correlation with STS-B's labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from word_overlap import correlation, overlap


def test_the_overlap_is_that_of_the_sets_of_words() -> None:
    assert overlap("The cat, the dog", "the cat ran") == pytest.approx(2 / 4)  # the, cat of the, cat, dog, ran
    assert overlap("", "") == 0


def test_the_correlation_follows_the_order_of_the_labels(tmp_path: Path) -> None:
    lines = ["sentence1\tsentence2\tscore", "a b\ta b\t5", "a b\ta c\t1", "a b\td c\t3"]  # overlaps 1, 1/3, 0
    (tmp_path / "STS-B").mkdir()
    for stem in ("train", "dev"):
        (tmp_path / "STS-B" / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    # Ranks 3, 2, 1 against 3, 1, 2: 1 - 6 * 2 / (3 * 8).
    assert correlation(tmp_path) == pytest.approx(0.5)
