"""List the diagrams of the report, and reduce the records of a run to the few points that they show.

Guarantee: a column has the numbers of the records bit for bit, in their order. What is missing, null or no number is
NaN there, and so is the 0 of a loss that the objective does not have. A number takes 8 bytes, where a parsed record
takes 6 KB. A thinned curve has at most 1,202 points: it is cut into buckets of consecutive points, and the lowest and
highest point of each are kept, so a spike of one step stays visible in a run of 400,000 steps.

Besides recorded fields, a line may show one of two baselines, which `baselines` computes from a record: what a
discriminator that has learnt nothing would reach. A curve that stays at its baseline shows that nothing was learnt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from electra_dist.run.metrics import EvalRecord, Metric, StepRecord, numbers_of

GUESSED_REPLACED = "guessed_replaced"  # share of the replaced tokens that a random guess finds
CONSTANT_GUESS_LOSS = "constant_guess_loss"  # loss of the best guess that is the same for every token


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Line of a diagram: which field of metrics.jsonl it shows, and how. A line without values is not drawn."""

    field: str  # of the records in metrics.jsonl, or a baseline of `baselines`
    label: str  # in the legend
    kind: Literal["train", "eval"] = "train"  # kind of the records; "eval" is drawn as a line with points
    is_second: bool = False  # drawn in the second color of the diagram
    is_baseline: bool = False  # drawn thin and dashed in grey
    raw: bool = True  # draw every record; only for "train"
    smooth: bool = True  # draw the smoothed line, over a faint raw one; only for "train"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram of the report: its lines over the optimizer steps and the format of its y axis."""

    name: str  # identifies the panel, and seeds the ids within its SVG
    title: str  # above the diagram, with the unit
    lines: tuple[CurveLine, ...]  # at most two colors
    scale: Literal["linear", "percent", "thousands", "scientific", "log"] = "linear"  # of the y axis
    chance: float | None = None  # value of a guess, drawn as a dashed horizontal line; None: no such line


def _loss_panel(field: str, title: str, baseline: CurveLine | None = None) -> Panel:
    """Return the diagram of one part of the loss, in training and on held-out rows."""
    held_out = CurveLine(field=field, label="held out", kind="eval", is_second=True)
    lines: tuple[CurveLine, ...] = (CurveLine(field=field, label="training"), held_out)
    if baseline is not None:
        lines = (*lines, baseline)
    return Panel(name=field, title=title, lines=lines)


PANELS = (
    _loss_panel("mlm_loss", "MLM loss (nats per masked token)"),
    _loss_panel(
        "rtd_loss",
        "RTD loss (nats per token)",
        CurveLine(field=CONSTANT_GUESS_LOSS, label="constant guess", is_baseline=True, raw=False),
    ),
    _loss_panel("token_loss", "Loss of the tokens that the discriminator predicts (nats per token)"),
    Panel(
        name="rtd_accuracy",
        title="Tokens that the discriminator classifies correctly",
        lines=(
            CurveLine(field="replaced_accuracy", label="replaced", is_second=True),
            CurveLine(field="original_accuracy", label="original"),
            CurveLine(field=GUESSED_REPLACED, label="random guess", is_baseline=True, raw=False),
        ),
        scale="percent",
    ),
    Panel(
        name="auc",
        title="ROC-AUC of the discriminator on held-out rows",
        lines=(CurveLine(field="auc", label="ROC-AUC", kind="eval"),),
        chance=0.5,
    ),
    Panel(
        name="context_auc",
        title="Context AUC on held-out rows",
        lines=(CurveLine(field="context_auc", label="context AUC", kind="eval", is_second=True),),
        chance=0.5,
    ),
    Panel(
        name="lr",
        title="Learning rate",
        lines=(
            CurveLine(field="lr", label="lr", smooth=False),
            CurveLine(field="generator_lr", label="generator's lr", is_second=True, smooth=False),
        ),
        scale="scientific",
    ),
    Panel(
        name="grad_norm",
        title="Gradient norm before clipping",
        lines=(CurveLine(field="grad_norm", label="global norm"),),
        scale="log",
    ),
    Panel(
        name="replaced_fraction",
        title="Tokens that the generator replaced",
        lines=(CurveLine(field="replaced_fraction", label="of all tokens"),),
        scale="percent",
    ),
    Panel(
        name="temperature",
        title="Temperature of the generator's samples",
        lines=(CurveLine(field="temperature", label="scheduled", smooth=False),),
    ),
    Panel(
        name="loss_weights",
        title="Weights of the losses",
        lines=(
            CurveLine(field="mlm_weight", label="generator", is_second=True, smooth=False),
            CurveLine(field="rtd_weight", label="discriminator", smooth=False),
        ),
    ),
    Panel(
        name="mask_shares",
        title="Masked tokens, and masked tokens replaced at random",
        lines=(
            CurveLine(field="mask_prob", label="masked, of all tokens", smooth=False),
            CurveLine(field="random_share", label="random, of the masked", is_second=True, smooth=False),
        ),
        scale="percent",
    ),
    Panel(
        name="generator_entropy",
        title="Entropy of the generator (nats per masked token)",
        lines=(CurveLine(field="generator_entropy", label="held out", kind="eval"),),
    ),
    Panel(
        name="sampled_correct",
        title="Samples of the generator that are right",
        lines=(CurveLine(field="sampled_correct", label="held out", kind="eval"),),
        scale="percent",
    ),
    Panel(
        name="tokens_per_s",
        title="Tokens per second",
        lines=(CurveLine(field="tokens_per_s", label="all ranks"),),
        scale="thousands",
    ),
    Panel(
        name="gpu_power",
        title="Power of the GPUs of the first node (W)",
        lines=(CurveLine(field="gpu_power_w", label="all GPUs of the node"),),
        scale="thousands",
    ),
)


def baselines(record: StepRecord) -> dict[str, float]:
    """Return the baselines of a training step: what a discriminator that has learnt nothing would reach.

    They are `guessed_replaced` and `constant_guess_loss`, named as the fields of diagrams.
    """
    return {
        GUESSED_REPLACED: guessed_replaced(record),
        CONSTANT_GUESS_LOSS: constant_guess_loss(record.replaced_fraction),
    }


def guessed_replaced(record: StepRecord) -> float:
    """Return the share of all tokens that the discriminator called replaced in a training step.

    A random guess that calls the same number of tokens replaced finds this share of the replaced tokens. NaN if no
    token or every token was replaced.
    """
    replaced = record.replaced_fraction
    if not 0 < replaced < 1:
        return math.nan
    rightly_called = replaced * record.replaced_accuracy
    wrongly_called = (1 - replaced) * (1 - record.original_accuracy)
    return rightly_called + wrongly_called


def guessed_by_recall(evaluation: EvalRecord) -> float:
    """Return the share of all tokens that the discriminator called replaced in an evaluation, as `guessed_replaced`.

    NaN if precision, recall and accuracy do not determine it: if all or none of its decisions were right.
    """
    precision, recall = evaluation.precision, evaluation.recall
    # With f the share of replaced tokens, wrong decisions are f * (1 - recall) of all tokens, which were missed, and
    # f * recall * (1 - precision) / precision, which were falsely called. Rightly called are f * recall.
    wrong_per_called = precision * (1 - recall) + recall * (1 - precision)  # times f / precision, all wrong decisions
    if not wrong_per_called > 0:
        return math.nan
    return recall * (1 - evaluation.accuracy) / wrong_per_called


def constant_guess_loss(replaced_fraction: float) -> float:
    """Return the loss, in nats per token, of a guess that gives every token the probability `replaced_fraction`.

    It is the entropy of this fraction: the lowest loss of a discriminator that cannot tell tokens apart. NaN for a
    fraction outside of (0, 1).
    """
    if not 0 < replaced_fraction < 1:
        return math.nan
    original_fraction = 1 - replaced_fraction
    return -replaced_fraction * math.log(replaced_fraction) - original_fraction * math.log(original_fraction)


_MAX_BUCKETS = 600  # of a thinned curve; each gives two points
_MAX_SMOOTHED = 2400  # points of a curve before it is smoothed; a longer one is averaged down to them
_SMOOTHING_SPAN = 40  # points


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """Recorded numbers of one run from which its diagrams are drawn."""

    name: str  # of the run; shown where a diagram has several runs
    columns: Mapping[str, MetricColumns]  # by kind of the records, from `columns_of`
    resumes: Sequence[int] = ()  # steps at which the run was resumed from a checkpoint

    @property
    def last_step(self) -> float:
        """Return the highest step of all records, or 0 if there are none."""
        return max((columns.column("step").max() for columns in self.columns.values() if len(columns)), default=0)

    def curve(self, line: CurveLine) -> Curve:
        """Return the points of a line of a diagram."""
        return self.columns[line.kind].curve(line.field)


def columns_of(records: Iterable[Metric], further_fields: Sequence[str] = ()) -> dict[str, MetricColumns]:
    """Collect from records of metrics.jsonl the columns of numbers for the diagrams, by kind: "train" and "eval".

    Records are read one by one, so a long file is never in memory as a whole. `further_fields` are training fields
    that get a column, too.
    """
    columns = {}
    for kind in ("train", "eval"):
        fields = [line.field for panel in PANELS for line in panel.lines if line.kind == kind]
        columns[kind] = MetricColumns([*fields, *further_fields])
    for record in records:
        if isinstance(record, StepRecord):
            columns["train"].append(numbers_of(record) | baselines(record))
        elif isinstance(record, EvalRecord):
            columns["eval"].append(numbers_of(record))
    return columns


class MetricColumns:
    """Columns of numbers for "step" and each given field, to which records are appended one by one."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(dict.fromkeys(["step", *fields]))
        self._numbers = array("d")  # record by record

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the numbers of one record; a missing field becomes NaN."""
        self._numbers.extend([_number(record.get(field)) for field in self._fields])

    def __len__(self) -> int:
        return len(self._numbers) // len(self._fields)

    def column(self, field: str) -> np.ndarray:
        """Return a copy of a field's numbers, float64 [n]; all are NaN for an unknown field."""
        if field not in self._fields:
            return np.full(len(self), math.nan)
        rows = np.frombuffer(self._numbers, dtype=np.float64).reshape(len(self), len(self._fields))
        return rows[:, self._fields.index(field)].copy()

    def curve(self, field: str) -> Curve:
        """Return the points of the records in which a field is finite."""
        values = self.column(field)
        is_finite = np.isfinite(values)
        return Curve(self.column("step")[is_finite], values[is_finite])


def _number(value: object) -> float:
    # NaN stands for anything else, and for an integer that no float can hold.
    if type(value) is float:
        return value
    if not isinstance(value, int):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


class Curve(NamedTuple):
    """Points of a curve in the order of the records: a step, and the finite value of a field."""

    steps: np.ndarray  # float64 [n]
    values: np.ndarray  # float64 [n]

    def smoothed(self) -> Curve:
        """Return a smoothed curve of at most 2,400 points; a longer curve is first averaged over blocks of points.

        A smoothed value has no lag: it is the mean of two exponential means, from the left and from the right, whose
        lags are opposite and cancel. Weights fall by the factor 1 - 2 / (span + 1) per point of distance; the span is
        40 points, for a short curve at most n / 10, but at least 1.
        """
        steps, values = self
        if len(values) > _MAX_SMOOTHED:
            steps = np.array([block.mean() for block in np.array_split(steps, _MAX_SMOOTHED)])
            values = np.array([block.mean() for block in np.array_split(values, _MAX_SMOOTHED)])
        span = min(_SMOOTHING_SPAN, max(1.0, len(values) / 10))
        decay = 1 - 2 / (span + 1)
        mean_from_left = _exponential_mean(values, decay)
        mean_from_right = _exponential_mean(values[::-1], decay)[::-1]
        return Curve(steps, (mean_from_left + mean_from_right) / 2)

    def thinned(self, num_buckets: int = _MAX_BUCKETS) -> Curve:
        """Return only both ends, and the lowest and the highest point of each of `num_buckets` pieces.

        A curve of at most 2 * `num_buckets` points is returned whole.
        """
        if len(self.values) <= 2 * num_buckets:
            return self
        last_index = len(self.values) - 1
        selected = {0, last_index}
        for bucket_indices in np.array_split(np.arange(len(self.values)), num_buckets):
            bucket_values = self.values[bucket_indices]
            selected.add(int(bucket_indices[bucket_values.argmin()]))
            selected.add(int(bucket_indices[bucket_values.argmax()]))
        return self._points_at(np.array(sorted(selected)))

    def evenly_spaced(self, max_points: int) -> Curve:
        """Return at most `max_points` points, evenly spaced by number, both ends included."""
        num_points = len(self.values)
        if num_points <= max_points:
            return self
        return self._points_at(np.unique(np.linspace(0, num_points - 1, max_points).round().astype(np.int64)))

    def _points_at(self, indices: np.ndarray) -> Curve:
        return Curve(self.steps[indices], self.values[indices])


def _exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Return for each value the weighted mean of this and all earlier values; weights fall by `decay` per value."""
    means = np.empty(len(values))
    weighted_sum = 0.0
    weight_sum = 0.0
    for index, value in enumerate(values):
        weighted_sum = decay * weighted_sum + value
        weight_sum = decay * weight_sum + 1
        means[index] = weighted_sum / weight_sum
    return means
