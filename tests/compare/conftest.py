"""A comparison so small that its runs take seconds: a corpus of numbered words, and a task about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.real_runs import write_tiny_config


@pytest.fixture(scope="session")
def words_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`yes` where a text has w10 and `no` where it has w20."""
    folder = tmp_path_factory.mktemp("words")
    rng = random.Random(0)
    for stem, size in (("train", 120), ("dev", 60)):
        lines = ["text\tanswer"]
        for _ in range(size):
            words, is_ten = [f"w{rng.randrange(30, 200)}" for _ in range(6)], rng.random() < 0.5
            words[rng.randrange(6)] = "w10" if is_ten else "w20"
            lines.append(f"{' '.join(words)}\t{'yes' if is_ten else 'no'}")
        (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def make_comparison(tiny_corpus: Path, words_task: Path, tmp_path: Path) -> Callable[..., Path]:
    """`make_comparison(steps=8, seeds=[1])` writes the YAML file of a comparison and its base."""

    def make(**changes: object) -> Path:
        small = {"checkpoint.every_steps": 1000, "checkpoint.keep_last": 1, "log.eval_rows": 8}
        write_tiny_config(tmp_path / "base.yaml", tmp_path / "unused", str(tiny_corpus), **small)
        task = {"data": str(words_task), "text_a": "text", "label": "answer", "set": {"max_length": 16}}
        tree: dict[str, object] = {
            "base": "base.yaml",
            "output": str(tmp_path / "out"),
            "objectives": ["rtd", "mlm"],
            "seeds": [1],
            "steps": 8,
            "evaluate_at": [0.5, 1.0],
            "minimal_pairs": False,
            "tasks": {"words": task, "fewer": {**task, "max_train": 60}},
        }
        file = tmp_path / "comparison.yaml"
        file.write_text(
            yaml.safe_dump({key: value for key, value in {**tree, **changes}.items() if value is not None})
        )
        return file

    return make
