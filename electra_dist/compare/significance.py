"""Compare the scores of two objectives seed by seed, and judge a comparison by the criterion that its config states.

How: two runs with the same seed read the same rows in the same order, so their scores are paired: the difference of
each seed is formed first. Two errors are stated. The seed error is the standard error of the mean difference over the
seeds, sd / sqrt(n), and belongs to a paired t-test. The test error is that of the choice of the test examples, which
are the same for all seeds, so more seeds do not make it smaller. Both objectives are tested on the same examples, so
it is the error of the mean over the examples of the difference between them: for single right and wrong answers that
of McNemar's test, for other scores that of the bootstrap with common resamples. Where the results on single examples
are not kept, it is sqrt(e_1^2 + e_2^2) for the mean errors of the two objectives, which is an upper bound.

Guarantee: the verdict is a function of the scores and of the criterion alone. The criterion is recorded in the output
folder when the comparison is first started, with the number of scores that existed by then, and so is each change of
it, so that a reader sees whether it was stated before the scores.

Limits: with two seeds the seed error has one degree of freedom, so a difference of two standard errors has p = 0.3.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from electra_dist.compare.checkpoint_scores import CheckpointScore
from electra_dist.compare.comparison_config import Criterion
from electra_dist.run.records import Count, Record, append_record, read_records

REMARK = (
    "Mean over the seeds of the difference to the baseline, paired by seed, in points of a per cent. After +- comes "
    "the standard error: the larger one of that over the seeds and that over the test examples. The latter is paired, "
    "too, because both have the same examples; the unpaired error is what it would be with different ones. p is that "
    "of a two-sided paired t-test over the seeds."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """An objective's score minus the baseline's score on one task, averaged over the seeds, as a fraction."""

    entry: str  # name of the objective
    baseline: str  # name of the objective with which it is compared
    task: str
    mean: float
    num_seeds: int  # seeds with a score of both
    seed_error: float | None  # standard error over the seeds; None with a single seed
    test_error: float | None  # standard error over the choice of the test examples; None if it is not known
    unpaired_error: float | None  # the same, if each objective had test examples of its own
    p_value: float | None  # two-sided, of a paired t-test over the seeds; None with a single seed

    @property
    def standard_error(self) -> float | None:
        """Return the larger of the standard errors over seeds and over test examples; None if neither is known."""
        return max((error for error in (self.seed_error, self.test_error) if error is not None), default=None)


def paired_difference(
    scores: Sequence[CheckpointScore], entry: str, baseline: str, task: str, num_checkpoints: int = 1
) -> Difference | None:
    """Return the mean of `entry` minus `baseline` on a task, paired by seed; None if no seed has scores of both.

    `scores` are those of at most `num_checkpoints` checkpoints of each run, over which the mean is formed. A seed
    counts if both runs have all of them.
    """
    entry_scores = _by_seed(scores, entry, task)
    baseline_scores = _by_seed(scores, baseline, task)
    seeds = [
        seed
        for seed in sorted(set(entry_scores) & set(baseline_scores))
        if len(entry_scores[seed]) == len(baseline_scores[seed]) == num_checkpoints
    ]
    if not seeds:
        return None
    gains = [_mean_value(entry_scores[seed]) - _mean_value(baseline_scores[seed]) for seed in seeds]
    mean = statistics.fmean(gains)
    seed_error = None
    p_value = None
    if len(seeds) > 1:
        seed_error = statistics.stdev(gains) / math.sqrt(len(seeds))
        p_value = _p_value(mean, seed_error, len(seeds))
    counted_entry = list(itertools.chain.from_iterable(entry_scores[seed] for seed in seeds))
    counted_baseline = list(itertools.chain.from_iterable(baseline_scores[seed] for seed in seeds))
    unpaired_error = _unpaired_error(counted_entry, counted_baseline)
    paired_error = _paired_error(counted_entry, counted_baseline)
    return Difference(
        entry=entry,
        baseline=baseline,
        task=task,
        mean=mean,
        num_seeds=len(seeds),
        seed_error=seed_error,
        test_error=unpaired_error if paired_error is None else paired_error,
        unpaired_error=unpaired_error,
        p_value=p_value,
    )


def difference_text(difference: Difference | None) -> str:
    """Format a difference in percentage points with its standard error, or "-" for None.

    An example is "+1.2 +- 0.4 (unpaired 0.7, p 0.03)".
    """
    if difference is None:
        return "-"
    text = f"{100 * difference.mean:+.1f}"
    if difference.standard_error is not None:
        text += f" +- {100 * difference.standard_error:.1f}"
    remarks = []
    if difference.unpaired_error is not None and difference.unpaired_error != difference.test_error:
        remarks.append(f"unpaired {100 * difference.unpaired_error:.1f}")
    if difference.p_value is not None:
        remarks.append(f"p {difference.p_value:.2g}")
    return f"{text} ({', '.join(remarks)})" if remarks else text


def difference_title(task: str, other: str, baseline: str) -> str:
    """Return the title of a task's column in a table of differences to `baseline`, such as "rte".

    If another objective is subtracted in this column, the title names it: "detection (minus electric)".
    """
    return task if other == baseline else f"{task} (minus {other})"


def differences_to(
    baseline_of: Mapping[str, str],
    scores: Sequence[CheckpointScore],
    entries: Sequence[str],
    baseline: str,
    num_checkpoints: int = 1,
) -> list[Difference]:
    """Return the `paired_difference` of each objective but `baseline` on each task, if a seed has the scores of both.

    `baseline_of` maps each task to the objective whose score is subtracted. That is `baseline`, unless it has no score
    of such a task.
    """
    found = [
        paired_difference(scores, entry, other, task, num_checkpoints)
        for entry in entries
        for task, other in baseline_of.items()
        if entry not in (baseline, other)
    ]
    return [difference for difference in found if difference is not None]


def difference_rows(
    differences: Sequence[Difference], entries: Sequence[str], baseline: str, baseline_of: Mapping[str, str]
) -> list[list[str]]:
    """Return the titles of a table of differences, then a row of texts for each objective but the baseline.

    `differences` are what `differences_to` returns for the other arguments. A row has a text for each task in
    `baseline_of`, "-" where there is no difference.
    """
    difference_of = {(difference.entry, difference.task): difference for difference in differences}
    titles = [difference_title(task, other, baseline) for task, other in baseline_of.items()]
    rows = [[f"minus {baseline}", *titles]]
    for entry in entries:
        if entry != baseline:
            rows.append([entry, *(difference_text(difference_of.get((entry, task))) for task in baseline_of)])
    return rows


def _by_seed(scores: Sequence[CheckpointScore], entry: str, task: str) -> dict[int, list[CheckpointScore]]:
    """Return seed -> scores of the objective `entry` on `task`, in the order of the checkpoints."""
    by_seed: dict[int, list[CheckpointScore]] = {}
    for score in scores:
        if score.entry == entry and score.task == task and score.value is not None:
            by_seed.setdefault(score.seed, []).append(score)
    return by_seed


def _mean_value(scores: Sequence[CheckpointScore]) -> float:
    return statistics.fmean(score.value for score in scores if score.value is not None)


def _p_value(mean: float, standard_error: float, num_seeds: int) -> float:
    """Return the two-sided p-value of a paired t-test; for a standard error of 0, it is 1 if the mean is 0, else 0."""
    if standard_error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    statistic = abs(mean) / standard_error
    return float(2.0 * stats.t.sf(statistic, num_seeds - 1))


def _paired_error(entry_scores: Sequence[CheckpointScore], baseline_scores: Sequence[CheckpointScore]) -> float | None:
    """Return the standard error, over the choice of the test examples, of the mean difference between two objectives.

    Both were tested on the same examples. It is None if the results on single examples are not kept for all scores,
    or are of different examples.
    """
    gains = []
    kind_sizes: list[int] = []
    for entry_score, baseline_score in zip(entry_scores, baseline_scores, strict=True):
        entry_items = entry_score.measured.items
        baseline_items = baseline_score.measured.items
        if entry_items is None or baseline_items is None:
            return None
        if entry_items.kind_sizes != baseline_items.kind_sizes:
            return None
        kind_sizes = entry_items.kind_sizes
        if kind_sizes:
            gains.append(entry_items.is_hit().astype(float) - baseline_items.is_hit())
        else:
            gains.append(np.subtract(entry_items.resamples, baseline_items.resamples))
    gain_N = np.mean(gains, axis=0)  # of each example, or on each resample
    if not kind_sizes:
        return float(np.std(gain_N))
    # The kinds are strata: the variance of the sum over all examples is the sum of those of the kinds.
    ends = np.cumsum(kind_sizes)
    variance_of_sum = sum(
        size * float(np.var(gain_N[end - size : end])) for size, end in zip(kind_sizes, ends, strict=True)
    )
    return math.sqrt(variance_of_sum) / len(gain_N)


def _unpaired_error(
    entry_scores: Sequence[CheckpointScore], baseline_scores: Sequence[CheckpointScore]
) -> float | None:
    """Return the standard error of a difference if each objective had its own test examples; None if unknown."""
    squares = 0.0
    for scores in (entry_scores, baseline_scores):
        errors = [score.measured.standard_error for score in scores if score.measured.standard_error is not None]
        if len(errors) < len(scores):
            return None
        squares += statistics.fmean(errors) ** 2
    return math.sqrt(squares)


CRITERION_FILE = "criterion.jsonl"  # in the output folder: one line for the criterion, and one for each change of it


class Verdict(NamedTuple):
    """Answer to a criterion ("met", "not met", or "open" while scores are missing), and the numbers behind it."""

    answer: str
    passed: list[str]  # metrics on which `arm` beats `baseline` by the stated number of standard errors
    differences: dict[str, Difference]  # metric -> score of `arm` minus `baseline`; metrics without scores are missing


def judge(criterion: Criterion, scores: Sequence[CheckpointScore], num_seeds: int) -> Verdict:
    """Judge a criterion by the scores of the runs' last checkpoints; the answer is "open" while seeds are missing.

    A metric is passed if the mean over the seeds of `arm` minus `baseline` is larger than `standard_errors` standard
    errors. Of the error over the seeds and that over the test examples, the larger one counts.
    """
    differences: dict[str, Difference] = {}
    passed = []
    is_complete = True
    for metric in criterion.metrics:
        difference = paired_difference(scores, criterion.arm, criterion.baseline, metric)
        if difference is not None:
            differences[metric] = difference
        if difference is None or difference.num_seeds < num_seeds or difference.standard_error is None:
            is_complete = False
        elif difference.mean > criterion.standard_errors * difference.standard_error:
            passed.append(metric)
    if not is_complete:
        answer = "open"
    elif len(passed) >= criterion.num_needed:
        answer = "met"
    else:
        answer = "not met"
    return Verdict(answer=answer, passed=passed, differences=differences)


def verdict_lines(criterion: Criterion, verdict: Verdict) -> list[str]:
    """Return the criterion and its verdict as lines of text for compare.md and the terminal."""
    lines = [
        f"Criterion: {criterion.statement}",
        f"Checked as: {criterion.arm} minus {criterion.baseline} above {criterion.standard_errors:g} standard errors "
        f"on at least {criterion.num_needed} of {', '.join(criterion.metrics)}.",
    ]
    for metric in criterion.metrics:
        mark = "passed" if metric in verdict.passed else "not passed"
        lines.append(f"{metric}: {difference_text(verdict.differences.get(metric))}, {mark}")
    if verdict.answer == "open":
        lines.append("Verdict: open, because scores of some seeds are missing")
    else:
        lines.append(f"Verdict: {verdict.answer} ({len(verdict.passed)} of {len(criterion.metrics)} metrics passed)")
    return lines


class StatedCriterion(Record):
    """Criterion by which a comparison of runs decides, with the time of its statement; a line of criterion.jsonl."""

    time: str
    scores: Count  # that existed by then
    criterion: dict[str, Any]


def record_criterion(folder: Path, criterion: Criterion, num_scores: int) -> str:
    """Append a criterion to criterion.jsonl if it is new or has changed; return a sentence on when it was stated.

    `num_scores` is the number of scores that exist already.
    """
    file = folder / CRITERION_FILE
    content = criterion.model_dump(mode="json")
    records = list(read_records(file, StatedCriterion.model_validate))
    if not records or records[-1].criterion != content:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = StatedCriterion(time=now, scores=num_scores, criterion=content)
        append_record(file, record)
        records.append(record)
    latest = records[-1]
    origin = "stated" if len(records) == 1 else f"changed (version {len(records)})"
    when = f"The criterion was {origin} at {latest.time}"
    if latest.scores == 0:
        return f"{when}, before the first score."
    return f"{when}, when {latest.scores} scores existed."
