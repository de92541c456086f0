"""Define what every way of scoring an encoder returns, keep these scores in a file, and summarize them over seeds.

Guarantee: a stored score is found again only by its seed and its identity, a digest of everything else that it depends
on: weights, data and settings. It is on the disk when `ScoreStore.add` returns.

Fine-tuning with one seed counts as failed if its loss became NaN or infinite (diverged) or if all predictions of the
trained model are equal (degenerate); the failures of its score say why. The score of a degenerate seed stays in the
median, because a user who trains once may get it. A diverged seed has no score.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from rich.table import Table

from electra_dist.errors import UserError
from electra_dist.run.records import append_record, read_records
from electra_dist.store.json_file import DamagedJson, canonical_json, validate_json

GLUE_AVERAGE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")  # the eight tasks of the paper's tables
_CHECKPOINT = "checkpoint"  # key of a line under which a comparison names the checkpoint that was scored


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemResults:
    """Results of an encoder on single test items, from which the error of a difference to another encoder follows.

    Either `hits` and `kind_sizes` are given, for a score that is a share of independent items, or `resamples`.
    """

    hits: str = ""  # base64 of one bit for each item, 1 if the encoder is right; the items of a kind follow each other
    kind_sizes: list[int] = dataclasses.field(default_factory=list)  # number of items of each kind
    # Score on each of the bootstrap's resamples of the test data, which are the same for all encoders.
    resamples: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def of_hits(cls, hits_by_kind: Sequence[Sequence[bool]]) -> ItemResults:
        """Pack whether the encoder is right on each item; there is one list for each kind of item, in any order."""
        bits = np.concatenate([np.asarray(hits, dtype=bool) for hits in hits_by_kind])
        packed = base64.b64encode(np.packbits(bits).tobytes()).decode()
        return cls(hits=packed, kind_sizes=[len(hits) for hits in hits_by_kind])

    def in_unit(self, factor: float) -> ItemResults:
        """Return these results for the score times `factor`, such as 100 for per cent; hits stay as they are."""
        return dataclasses.replace(self, resamples=[factor * value for value in self.resamples])

    def is_hit(self) -> np.ndarray:
        """Return whether the encoder is right on each item, bool [items]."""
        packed = np.frombuffer(base64.b64decode(self.hits), np.uint8)
        return np.unpackbits(packed, count=sum(self.kind_sizes)).astype(bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Score of an encoder by one measure, such as a task with one fine-tuning seed, a probe, or minimal pairs.

    The fields are the keys of a line in a `ScoreStore`.
    """

    task: str  # name of the task or, in a comparison, of the column
    mode: str  # how the score was made: finetune, probe, tags, heads, pairs or context
    seed: int = 0  # of fine-tuning or, in a comparison, of pretraining; 0 for a probe by itself
    identity: str = ""  # digest of all that the score depends on but the seed
    metric: str  # name of the score
    score: float | None  # a fraction, per cent for SQuAD; None if the loss diverged, or nothing can be scored
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # of a task, the score among them
    failures: tuple[str, ...] = ()  # why there is no score, or why seeds of fine-tuning count as failed, one line each
    train_loss: float | None = None  # mean of the last tenth of the steps; None without training, or if it diverged
    steps: int = 0  # of fine-tuning that were made; 0 if the loss diverged
    planned_steps: int = 0  # more than `steps` if it stopped early
    examples: int = 0  # training examples or windows
    seconds: float = 0.0  # time that scoring took
    standard_error: float | None = None  # over the choice of the test examples; None if it is not known
    layer: int | None = None  # of a probe: the layer that was chosen on the training data; 0 is the embeddings
    layer_scores: list[float] = dataclasses.field(default_factory=list)  # of a probe: score at layers 0, 1, ...
    # Of a probe: scores at layers 0, 1, ... on held-out training data, which choose `layer`; None: nothing held out.
    held_out_scores: list[float | None] = dataclasses.field(default_factory=list)
    details: dict[str, float] = dataclasses.field(default_factory=dict)  # kind of minimal pair -> its accuracy
    items: ItemResults | None = None  # None if only the score is kept

    def numbers(self) -> dict[str, Any]:
        """Return all fields except `seconds`, the only one that differs when a score is computed again."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "seconds"}


_MEASURED = TypeAdapter(Measured)
_KEYS = {field.name for field in dataclasses.fields(Measured)}


def digest_of(tree: Mapping[str, Any]) -> str:
    """Return the sha256, in hexadecimal, of nested dicts and lists; equal contents give equal digests."""
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()


class ScoreStore:
    """JSON-lines file of scores, which are found by identity and seed, so that nothing is scored twice."""

    def __init__(self, file: Path) -> None:
        """Read the scores of `file`, which may be missing; raise UserError if a line is no score of this version."""
        self._file = file
        self._scores: dict[tuple[str, int], Measured] = {}
        for number, record in enumerate(read_records(file, dict), start=1):
            record.pop(_CHECKPOINT, None)
            try:
                if set(record) - _KEYS:
                    raise DamagedJson("another version has written it")
                measured = validate_json(_MEASURED, record)
            except DamagedJson:
                raise UserError(
                    f"{file}:{number}: not a score of this version; name another output folder, or remove the file, "
                    f"and its scores are computed again"
                ) from None
            self._scores[measured.identity, measured.seed] = measured

    def find(self, identity: str, seed: int) -> Measured | None:
        """Return the newest stored score with this seed and `identity` (the digest of all else), or None."""
        return self._scores.get((identity, seed))

    def add(self, measured: Measured, checkpoint: Mapping[str, Any] | None = None) -> None:
        """Append a score, and wait until it is on the disk; `checkpoint` says to a reader what was scored."""
        line = dataclasses.asdict(measured)
        if checkpoint is not None:
            line[_CHECKPOINT] = checkpoint
        append_record(self._file, line)
        self._scores[measured.identity, measured.seed] = measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedSummary:
    """Summary of the results of one task over its seeds: median, lowest and highest score, and failed seeds.

    A diverged seed (NaN or infinite loss) has no score, so it is not part of the median, lowest and highest score.
    These are None if all seeds diverged.
    """

    task: str
    mode: str  # "finetune" or "probe"
    metric: str  # name of the score
    median: float | None
    low: float | None
    high: float | None
    scores: list[float | None]  # in the order of the seeds; None for a diverged seed
    medians: dict[str, float]  # metric -> median over the seeds that have it
    failed: dict[int, str]  # seed -> why it counts as failed
    seconds: float  # total over the seeds


def summarize(results: Sequence[Measured]) -> SeedSummary:
    """Summarize results of one task that differ in their seeds; there must be at least one, in any order."""
    by_seed = sorted(results, key=lambda result: result.seed)
    scores = [result.score for result in by_seed if result.score is not None]
    return SeedSummary(
        task=by_seed[0].task,
        mode=by_seed[0].mode,
        metric=by_seed[0].metric,
        median=statistics.median(scores) if scores else None,
        low=min(scores, default=None),
        high=max(scores, default=None),
        scores=[result.score for result in by_seed],
        medians=_metric_medians(by_seed),
        failed={result.seed: "; ".join(result.failures) for result in by_seed if result.failures},
        seconds=sum(result.seconds for result in by_seed),
    )


def _metric_medians(results: Sequence[Measured]) -> dict[str, float]:
    """Return each metric's median over the seeds; diverged seeds, which have no metrics, are left out."""
    values_of: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.metrics.items():
            values_of.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in values_of.items()}


def glue_average(summaries: Sequence[SeedSummary]) -> float | None:
    """Return the mean of the median scores of the eight tasks in `GLUE_AVERAGE`; None if a task has no score."""
    median_of = {summary.task: summary.median for summary in summaries}
    medians = []
    for task in GLUE_AVERAGE:
        median = median_of.get(task)
        if median is None:
            return None
        medians.append(median)
    return statistics.fmean(medians)


def results_table(
    title: str, summaries: Sequence[SeedSummary], shown_metric: Callable[[str, str], str] = lambda task, name: name
) -> Table:
    """Return a table for the terminal: one row per task, scores in per cent, and the GLUE average if there is one.

    `shown_metric` returns the name of a task's metric for people.
    """
    table = Table("task", "metric", "median", "min", "max", "seeds", "failed", "other medians", title=title)
    for summary in summaries:
        other_medians = [
            f"{shown_metric(summary.task, name)} {percent(summary, value)}"
            for name, value in summary.medians.items()
            if name != summary.metric
        ]
        table.add_row(
            summary.task,
            summary.metric,
            percent(summary, summary.median),
            percent(summary, summary.low),
            percent(summary, summary.high),
            str(len(summary.scores)),
            _failed_seeds(summary),
            ", ".join(other_medians),
        )
    average = glue_average(summaries)
    if average is not None:
        table.add_row("GLUE", "mean of 8", f"{100 * average:.1f}")
    return table


def _failed_seeds(summary: SeedSummary) -> str:
    """Return how many seeds failed, and which, as in "2 of 5 (seeds 0, 3)"; "none" if no seed failed."""
    if not summary.failed:
        return "none"
    noun = "seed" if len(summary.failed) == 1 else "seeds"
    return f"{len(summary.failed)} of {len(summary.scores)} ({noun} {', '.join(map(str, summary.failed))})"


def percent(summary: SeedSummary, value: float | None) -> str:
    """Format a metric in per cent, as in "66.4"; "-" for None. SQuAD's metrics are per cent, all others fractions."""
    if value is None:
        return "-"
    is_per_cent = summary.task.startswith("squad")
    return f"{value:.1f}" if is_per_cent else f"{100 * value:.1f}"


def best_layer(held_out_scores: Sequence[float | None]) -> int:
    """Return the number of the layer with the highest score on held-out data; of equally good layers, the lowest.

    If a score is None, because there were too few examples to hold some out, return the last layer.
    """
    scores = [score for score in held_out_scores if score is not None]
    if len(scores) < len(held_out_scores):
        return len(held_out_scores) - 1
    return scores.index(max(scores))
