"""Errors of differences between models that are tested on the same items: planted differences, formulas by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from electra_dist.compare.checkpoint_scores import CheckpointScore
from electra_dist.compare.significance import Difference, difference_text, paired_difference
from electra_dist.finetune.stored_scores import ItemResults, Measured
from electra_dist.finetune.task_metrics import resampled

KINDS = 67
PAIRS_OF_KIND = 1000


def score(entry: str, seed: int, value: float, error: float, items: ItemResults, step: int = 10) -> CheckpointScore:
    measured = Measured(
        task="pairs", mode="pairs", seed=seed, metric="accuracy", score=value, standard_error=error, items=items
    )
    return CheckpointScore(entry=entry, step=step, flops=1e9, measured=measured)


def of_hits(entry: str, hits_by_kind: np.ndarray, seed: int = 1, step: int = 10) -> CheckpointScore:
    """Return the score of an encoder with the given results, bool [kinds, pairs], and its own standard error."""
    shares = hits_by_kind.mean(1)
    error = math.sqrt(float((shares * (1 - shares)).mean()) / hits_by_kind.size)
    items = ItemResults.of_hits([kind_hits.tolist() for kind_hits in hits_by_kind])
    return score(entry, seed, float(hits_by_kind.mean()), error, items, step)


def difference_of(scores: list[CheckpointScore], num_checkpoints: int = 1) -> Difference:
    difference = paired_difference(scores, "better", "base", "pairs", num_checkpoints)
    assert difference is not None
    return difference


def planted_hits() -> np.ndarray:
    """Return results of a model that is right on about 70 % of the pairs, more on some kinds than on others."""
    rng = np.random.default_rng(0)
    return rng.random((KINDS, PAIRS_OF_KIND)) < rng.uniform(0.5, 0.9, (KINDS, 1))


def test_a_planted_point_on_67_000_pairs_is_found_at_three_errors_and_two_equal_scorings_differ_by_none() -> None:
    hits = planted_hits()
    better = hits.copy()
    changed = np.random.default_rng(1).permutation(hits.size)[: hits.size // 5]  # a fifth of the pairs is decided anew
    better.flat[changed] = np.random.default_rng(2).random(len(changed)) < hits.mean() + 0.05

    found = difference_of([of_hits("better", better), of_hits("base", hits)])
    none = difference_of([of_hits("better", hits), of_hits("base", hits)])

    assert found.mean == pytest.approx(0.01, abs=0.003)
    assert found.test_error is not None
    assert found.unpaired_error is not None
    assert found.mean > 3 * found.test_error
    assert found.test_error < 0.75 * found.unpaired_error
    assert (none.mean, none.test_error) == (0.0, 0.0)
    assert "(unpaired 0.2)" in difference_text(found)


def test_the_paired_error_of_one_kind_is_that_of_mcnemars_test() -> None:
    """With b items that only one model solves, and c that only the other one does: sqrt(b + c - (b - c)^2 / n) / n."""
    both, only_better, only_base, neither = 50, 20, 10, 20
    better = np.repeat([True, True, False, False], [both, only_better, only_base, neither])
    base = np.repeat([True, False, True, False], [both, only_better, only_base, neither])

    difference = difference_of([of_hits("better", better[None]), of_hits("base", base[None])])

    assert difference.mean == pytest.approx(0.1)
    assert difference.test_error == pytest.approx(math.sqrt(30 - 100 / 100) / 100)


def test_seeds_and_checkpoints_are_averaged_item_by_item_before_the_error_is_formed() -> None:
    rng = np.random.default_rng(3)
    hits = rng.random((2, 4, 300)) < 0.6  # [model, run or checkpoint, items]
    gains = (hits[0].astype(float) - hits[1]).mean(0)
    expected = float(gains.std()) / math.sqrt(300)
    names = ("better", "base")

    of_seeds = [of_hits(names[model], hits[model, seed][None], seed) for model in (0, 1) for seed in range(4)]
    of_steps = [of_hits(names[model], hits[model, step][None], 1, step) for model in (0, 1) for step in range(4)]

    for difference, num_seeds in ((difference_of(of_seeds), 4), (difference_of(of_steps, 4), 1)):
        assert difference.num_seeds == num_seeds
        assert difference.mean == pytest.approx(gains.mean())
        assert difference.test_error == pytest.approx(expected)


def test_a_mean_over_checkpoints_takes_no_seed_that_lacks_one_of_them_in_one_run() -> None:
    """Both runs of seed 1 have two of three scores, but of different checkpoints: their difference is 0, not -10 %."""
    hits = np.random.default_rng(4).random((3, 1, 300)) < np.array([0.3, 0.5, 0.7])[:, None, None]
    scores = [of_hits("better", hits[step], 1, step) for step in (0, 1)]
    scores += [of_hits("base", hits[step], 1, step) for step in (1, 2)]
    of_second_seed = [of_hits(name, hits[step], 2, step) for name in ("better", "base") for step in range(3)]

    assert paired_difference(scores, "better", "base", "pairs", 3) is None
    difference = difference_of([*scores, *of_second_seed], 3)
    assert (difference.num_seeds, difference.mean) == (1, 0.0)


def test_a_paired_bootstrap_has_the_spread_of_differences_on_new_test_sets() -> None:
    """The truth: the standard deviation of the difference of two correlations over 500 fresh sets of 400 items."""

    def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        value = rng.normal(size=400)
        common = rng.normal(size=400)
        return value, value + common + 0.3 * rng.normal(size=400), value + common + 0.4 * rng.normal(size=400)

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.corrcoef(a, b)[0, 1])

    fresh = []
    for seed in range(500):
        value, first, second = drawn(np.random.default_rng(seed))
        fresh.append(correlation(value, first) - correlation(value, second))
    value, first, second = drawn(np.random.default_rng(1000))
    scores = []
    for entry, predicted in (("better", first), ("base", second)):
        values = resampled(400, lambda rows, predicted=predicted: correlation(value[rows], predicted[rows]))
        items = ItemResults(resamples=values)
        scores.append(score(entry, 1, correlation(value, predicted), float(np.std(values)), items))

    difference = difference_of(scores)

    assert difference.test_error == pytest.approx(np.std(fresh), rel=0.25)
    assert difference.unpaired_error is not None
    assert difference.unpaired_error > 2 * difference.test_error


def test_without_results_on_single_items_the_error_is_the_unpaired_one() -> None:
    scores = [of_hits("better", planted_hits()), of_hits("base", planted_hits()[:, :500])]

    difference = difference_of(scores)

    assert difference.test_error == difference.unpaired_error
    assert "unpaired" not in difference_text(difference)
