"""Samples for the training of a vocabulary: bounded, unbiased, the same each time, used again if they are complete."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from electra_dist.corpus.vocabulary_sample import VocabularySample
from electra_dist.errors import UserError
from launcher.cli.corpus import app


def documents(num_files: int, num_documents: int) -> list[tuple[int, int, str]]:
    """Return documents of 100 bytes, which name their file."""
    return [
        (file, number, f"{file}:{number} ".ljust(100, "x"))
        for file in range(num_files)
        for number in range(num_documents)
    ]


def take(folder: Path, limit_bytes: int, seed: int = 1) -> VocabularySample:
    """Return the finished sample of 10 files of 500 documents, 500,000 bytes in all."""
    sample = VocabularySample(folder, "inputs", limit_bytes, seed)
    sample.take(documents(10, 500), lambda file: None)
    return sample


@pytest.mark.parametrize("limit_bytes", [20_000, 60_000, 250_000])
def test_a_sample_holds_between_half_of_its_limit_and_the_limit_without_preference(
    tmp_path: Path, limit_bytes: int
) -> None:
    sample = take(tmp_path / "sample", limit_bytes)
    texts = list(sample.texts())

    assert len(texts) * 100 == sample.num_bytes()
    assert 0.4 * limit_bytes < sample.num_bytes() <= limit_bytes
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


def test_a_sample_that_is_cut_off_or_damaged_trains_no_vocabulary(tmp_path: Path) -> None:
    sample = take(tmp_path / "sample", 50_000)
    path = max((tmp_path / "sample").glob("*.zst"), key=lambda file: file.stat().st_size)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:100] + bytes(50) + content[150:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"damaged, because .*; delete .*sample and run the command again"):
            list(sample.texts())
    path.write_bytes(content)
    assert sum(len(text) for text in sample.texts()) == sample.num_bytes()


def test_a_finished_sample_is_recognized_and_an_unfinished_or_foreign_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    take(folder, 50_000)
    assert VocabularySample(folder, "inputs", 50_000, 1).is_finished()
    assert not VocabularySample(folder, "other inputs", 50_000, 1).is_finished()
    (folder / "sample.json").unlink()
    assert not VocabularySample(folder, "inputs", 50_000, 1).is_finished()


def test_a_vocabulary_is_trained_on_a_sample_of_large_inputs(tmp_path: Path) -> None:
    """The vocabulary has the frequent word; the folder of the sample is gone."""
    lines = [json.dumps({"text": f"frequent words and number {number}"}) for number in range(6000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    command = ["vocab", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "vocab.txt"), "--size", "80"]

    result = CliRunner().invoke(app, [*command, "--sample-gb", "0.001"])

    assert "training on a sample of" in result.output
    assert "frequent" in (tmp_path / "vocab.txt").read_text().split()
    assert not (tmp_path / "vocab.txt.sample").exists()
