"""Samples for the training of a vocabulary: bounded, unbiased, the same each time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from electra_launcher.cli.main import corpus_app as app
from typer.testing import CliRunner

from electra_dist.corpus.vocabulary import VocabularySample


def documents(num_files: int, num_documents: int) -> list[tuple[int, int, str]]:
    """Return documents of 100 bytes, which name their file."""
    return [
        (file, number, f"{file}:{number} ".ljust(100, "x"))
        for file in range(num_files)
        for number in range(num_documents)
    ]


def take(folder: Path, limit_bytes: int, seed: int = 1) -> VocabularySample:
    """Return the finished sample of 10 files of 500 documents, 500,000 bytes in all."""
    folder.mkdir()
    sample = VocabularySample(folder, limit_bytes, seed)
    sample.take(documents(10, 500), lambda file: None)
    return sample


@pytest.mark.parametrize("limit_bytes", [20_000, 60_000, 250_000])
def test_a_sample_holds_between_half_of_its_limit_and_the_limit_without_preference(
    tmp_path: Path, limit_bytes: int
) -> None:
    sample = take(tmp_path / "sample", limit_bytes)
    texts = list(sample.texts())

    assert len(texts) * 100 == sample.num_bytes
    assert 0.4 * limit_bytes < sample.num_bytes <= limit_bytes
    assert len(set(texts)) == len(texts)
    assert set(texts) <= {text for _, _, text in documents(10, 500)}
    per_file = Counter(text.split(":")[0] for text in texts)
    expected = len(texts) / 10
    assert all(abs(per_file[str(file)] - expected) < 4 * expected**0.5 for file in range(10))


def test_inputs_below_the_limit_are_taken_as_a_whole(tmp_path: Path) -> None:
    sample = take(tmp_path / "sample", 500_000)
    assert sorted(sample.texts()) == sorted(text for _, _, text in documents(10, 500))


def test_the_same_inputs_give_the_same_sample_and_another_seed_another_one(tmp_path: Path) -> None:
    first = list(take(tmp_path / "1", 50_000).texts())
    assert list(take(tmp_path / "2", 50_000).texts()) == first
    assert list(take(tmp_path / "3", 50_000, seed=2).texts()) != first


def test_a_vocabulary_is_trained_on_a_sample_of_large_inputs(tmp_path: Path) -> None:
    """The vocabulary has the frequent word; no file of the sample is left beside it."""
    lines = [json.dumps({"text": f"frequent words and number {number}"}) for number in range(6000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    command = ["vocab", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "vocab.txt"), "--size", "80"]

    result = CliRunner().invoke(app, [*command, "--sample-gb", "0.001"])

    assert "training on a sample of" in result.output
    assert "frequent" in (tmp_path / "vocab.txt").read_text().split()
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "vocab.txt"}
