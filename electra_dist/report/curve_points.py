"""Reduce the records of a run to the few points from which its curves are drawn, smoothed and unsmoothed.

Guarantee: a column has the numbers of the records bit for bit, in their order. What is missing, null or no number is
NaN there, and so is the 0 of a loss that the objective does not have. A number takes 8 bytes, where a parsed record
takes 6 KB. A thinned curve has at most 1,202 points: it is cut into buckets of consecutive points, and the lowest and
highest point of each are kept, so a spike of one step stays visible in a run of 400,000 steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from electra_dist.report.panels import PANELS, CurveLine, baselines
from electra_dist.run.metrics import EvalRecord, Metric, StepRecord, numbers_of

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
