"""Fine-tuned scores of a comparison: of taggers and of questions, with the results on single items."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig, TaskEntry
from electra_dist.compare.measures import TaskMeasure
from electra_dist.config.load import load_section
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.pretrained.encoder import Pretrained


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """Folder with tagged words: words below w40 have the tag A, all others B."""
    folder = tmp_path / "tagged"
    folder.mkdir()
    for stem, first in (("train", 30), ("dev", 33)):
        blocks = [
            "".join(f"w{n} {'A' if n < 40 else 'B'}\n" for n in range(first + i, first + i + 5)) for i in range(12)
        ]
        (folder / f"{stem}.txt").write_text("\n".join(blocks))
    return folder


def test_a_fine_tuned_tagger_has_the_median_of_its_seeds_and_the_results_of_the_seed_in_the_middle(
    encoder: Pretrained, tagged: Path
) -> None:
    task = TaggingTask("tagging", tagged)
    settings = FinetuneConfig(max_length=16, epochs=1, batch=4)
    singles = [finetune_task(encoder, task, settings, seed, torch.device("cpu")) for seed in range(3)]

    entry = TaskEntry(how="finetune", task="tagging", seeds=3)
    measured = TaskMeasure("tags", task, entry, settings).score(encoder, lambda: encoder, lambda *_: None)

    middle = sorted(singles, key=lambda single: single.score or 0.0)[1]
    assert measured.score == middle.score
    assert (measured.standard_error, measured.items) == (middle.standard_error, middle.items)
    assert measured.items is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"how": "probe"}, "tasks.tags: tagging: .* fine-tunes tagging, ner and squad1; set `how: finetune`"),
        ({"how": "finetune", "max_train": 5}, "tasks.tags: max_train: tagging uses all of its training data"),
    ],
)
def test_what_a_comparison_cannot_do_with_tagged_words_is_an_error(
    make_comparison: Callable[..., Path], tagged: Path, changes: dict[str, Any], message: str
) -> None:
    file = make_comparison(tasks={"tags": {"task": "tagging", "data": str(tagged), **changes}})
    with pytest.raises(UserError, match=message):
        Comparison(load_section(file, CompareConfig), file, None)
