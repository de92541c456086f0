"""Results of fine-tuned models on single items, and the errors of their scores, against bootstraps and formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from electra_dist.finetune.passage_windows import Passage, Question, SquadFile
from electra_dist.finetune.squad_task import Answers, score_answers
from electra_dist.finetune.stored_scores import ItemResults
from electra_dist.finetune.tagging_task import TaggingTask


@pytest.fixture
def tagging(tmp_path: Path) -> TaggingTask:
    """A task with 200 development sentences of 3 to 19 words, whose tags are A and B in turn."""
    rng = np.random.default_rng(1)
    for stem in ("train", "dev"):
        blocks = ["".join(f"w{n} {'AB'[n % 2]}\n" for n in range(rng.integers(3, 20))) for _ in range(200)]
        (tmp_path / f"{stem}.txt").write_text("\n".join(blocks))
    return TaggingTask("tagging", tmp_path)


def test_the_error_of_a_taggers_accuracy_is_that_of_a_bootstrap_over_sentences(tagging: TaggingTask) -> None:
    rng = np.random.default_rng(2)
    predicted = []
    for sentence in tagging.dev:
        is_right = rng.random(len(sentence.tags)) < rng.choice([0.3, 0.9])  # sentences differ
        predicted.append(tuple(tag if right else "C" for tag, right in zip(sentence.tags, is_right, strict=True)))

    outcome = tagging.score(predicted)

    words = np.array([len(sentence.tags) for sentence in tagging.dev])
    right = np.array([len(tags) - tags.count("C") for tags in predicted])
    drawn = rng.integers(200, size=(4000, 200))
    bootstrap = (right[drawn].sum(1) / words[drawn].sum(1)).std()
    assert outcome.standard_error == pytest.approx(bootstrap, rel=0.1)
    assert outcome.items is not None
    assert np.std(outcome.items.resamples) == pytest.approx(bootstrap, rel=0.2)
    assert np.mean(outcome.items.resamples) == pytest.approx(outcome.metrics["accuracy"], abs=bootstrap)


def test_two_taggers_that_err_on_the_same_words_have_a_smaller_error_of_their_difference(tagging: TaggingTask) -> None:
    rng = np.random.default_rng(3)
    words = [sentence.tags for sentence in tagging.dev]
    one = [tuple(tag if rng.random() < 0.6 else "C" for tag in tags) for tags in words]
    other = [tuple(tag if rng.random() < 0.98 else "C" for tag in tags) for tags in one]

    first, second = tagging.score(one), tagging.score(other)

    assert first.items is not None
    assert second.items is not None
    paired = np.std(np.subtract(first.items.resamples, second.items.resamples))
    assert paired < 0.4 * np.hypot(np.std(first.items.resamples), np.std(second.items.resamples))


def test_the_error_of_squads_f1_is_the_deviation_over_the_questions_by_the_root_of_their_number() -> None:
    num_questions = 400
    right = np.random.default_rng(4).random(num_questions) < 0.7
    text = "yes no"
    passage = Passage(text=text, ids=[5, 6], offsets=[(0, 3), (4, 6)])
    questions = [Question(id=str(n), text="?", passage=0, answers=("yes",), start=0) for n in range(num_questions)]
    file = SquadFile(passages=[text], questions=questions, left_out={})
    best = {n: (0.0, 0, 0) if right[n] else (0.0, 1, 1) for n in range(num_questions)}

    outcome = score_answers(1, file, Answers([passage], best, {}))

    assert outcome.metrics["f1"] == pytest.approx(100 * right.mean())
    expected = 100 * right.std() / num_questions**0.5
    assert outcome.standard_error == pytest.approx(expected, rel=0.15)  # of 200 resamples
    assert outcome.items is not None
    in_fractions = outcome.items.in_unit(0.01)
    assert np.std(in_fractions.resamples) == pytest.approx(outcome.standard_error / 100)


def test_single_answers_have_no_unit() -> None:
    items = ItemResults.of_hits([[True, False], [True]])
    assert items.in_unit(0.01) == items
