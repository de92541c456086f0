"""Fixtures of a comparison so small that its runs take seconds: a corpus of numbered words, and a task about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.real_runs import write_tiny_config
from support.small_encoder import encoder, model, vocabulary

__all__ = ["encoder", "model", "vocabulary"]


@pytest.fixture(scope="session")
def words_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a task's data: the answer is `yes` if the text contains w10, and `no` if it contains w20."""
    folder = tmp_path_factory.mktemp("words")
    rng = random.Random(0)
    for stem, num_texts in (("train", 120), ("dev", 60)):
        lines = ["text\tanswer"]
        for _ in range(num_texts):
            words = [f"w{rng.randrange(30, 200)}" for _ in range(6)]
            is_ten = rng.random() < 0.5
            words[rng.randrange(6)] = "w10" if is_ten else "w20"
            answer = "yes" if is_ten else "no"
            lines.append(f"{' '.join(words)}\t{answer}")
        (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def make_comparison(tiny_corpus: Path, words_task: Path, tmp_path: Path) -> Callable[..., Path]:
    """`make_comparison(steps=8, seeds=[1])` writes the YAML file of a comparison and its base config.

    By default it compares `rtd` and `mlm` with seed 1, for 8 steps of `rtd`, each scored after half and all of its
    steps on two tasks: `words`, and `fewer` with half of its training texts. An argument replaces a key of the file;
    None removes the key.
    """

    def make(**changes: object) -> Path:
        run_settings = {"checkpoint.every_steps": 1000, "checkpoint.keep_last": 1, "log.eval_rows": 8}
        write_tiny_config(tmp_path / "base.yaml", tmp_path / "unused", str(tiny_corpus), **run_settings)
        words = {"data": str(words_task), "text_a": "text", "label": "answer", "set": {"max_length": 16}}
        tree: dict[str, object] = {
            "base": "base.yaml",
            "output": str(tmp_path / "out"),
            "objectives": ["rtd", "mlm"],
            "seeds": [1],
            "steps": 8,
            "evaluate_at": [0.5, 1.0],
            "minimal_pairs": False,
            "tasks": {"words": words, "fewer": {**words, "max_train": 60}},
        }
        tree.update(changes)
        tree_without_none = {key: value for key, value in tree.items() if value is not None}
        file = tmp_path / "comparison.yaml"
        file.write_text(yaml.safe_dump(tree_without_none))
        return file

    return make
