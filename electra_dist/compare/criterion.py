"""Judge a comparison by the criterion that its config states before the runs.

Guarantee: the verdict is a function of the scores and of the criterion alone. The criterion is recorded in the output
folder when the comparison is first started, with the number of scores that existed by then, and so is each change of
it, so that a reader sees whether it was stated before the scores.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.comparison_config import Criterion
from electra_dist.compare.significance import Difference, difference_text, paired_difference
from electra_dist.run.records import Count, JsonlFile, Record, read_records

CRITERION_FILE = "criterion.jsonl"  # in the output folder: one line for the criterion, and one for each change of it


class Verdict(NamedTuple):
    """Answer to a criterion ("met", "not met", or "open" while scores are missing), and the numbers behind it."""

    answer: str
    passed: list[str]  # metrics on which `arm` beats `baseline` by the stated number of standard errors
    differences: dict[str, Difference]  # metric -> score of `arm` minus `baseline`; metrics without scores are missing


def judge(criterion: Criterion, scores: Sequence[Score], num_seeds: int) -> Verdict:
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
    """Append a new or changed criterion to criterion.jsonl; return a sentence that says when it was stated."""
    file = folder / CRITERION_FILE
    content = criterion.model_dump(mode="json")
    records = list(read_records(file, StatedCriterion.model_validate))
    if not records or records[-1].criterion != content:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = StatedCriterion(time=now, scores=num_scores, criterion=content)
        lines = JsonlFile(file)
        try:
            lines.append(record)
            lines.sync()
        finally:
            lines.close()
        records.append(record)
    latest = records[-1]
    origin = "stated" if len(records) == 1 else f"changed (version {len(records)})"
    when = f"The criterion was {origin} at {latest.time}"
    if latest.scores == 0:
        return f"{when}, before the first score."
    return f"{when}, when {latest.scores} scores existed."
