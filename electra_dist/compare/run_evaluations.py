"""Reads what the runs of a comparison have recorded at their own evaluations: the context AUC, and other curves.

The context AUC is the ROC-AUC of the model on held-out rows whose replaced tokens are drawn from the distribution of
single tokens in the corpus: word frequency alone gives 0.5, so what is above it was found in the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.compare.comparison_plan import Cell
from electra_dist.compare.measure import Measured
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.record_stream import iter_records

CONTEXT_AUC_METRIC = "ROC-AUC"
# Field of an evaluation's record -> title of its curve; values are of held-out rows.
CURVE_TITLES = {
    "context_auc": "context AUC",
    "auc": "ROC-AUC of replaced tokens",
    "mlm_loss": "loss of masked tokens",
}


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """Values that one run of a comparison has recorded at its evaluations, by training FLOPs."""

    entry: str  # name of the objective's entry
    seed: int
    points: dict[str, list[tuple[float, float]]]  # field of the record -> (FLOPs, value), ascending


def read_curves(cells: Sequence[Cell]) -> list[RunCurves]:
    """Return the curves of all runs that have recorded an evaluation, in the order of the runs.

    A field that a run does not record, or whose value is not finite, has no points.

    Args:
        cells: the runs of a comparison.
    """
    curves = []
    for cell in cells:
        value_at: dict[str, dict[int, float]] = {field: {} for field in CURVE_TITLES}  # by step
        for record in iter_records(Path(cell.config.run_dir) / METRICS_FILE, containing=b'"eval"'):
            if record.get("kind") != "eval":
                continue
            for field, values in value_at.items():
                value = record.get(field)
                if value is not None and math.isfinite(value):
                    values[record["step"]] = value  # A step that was repeated after a restart counts once.
        points = {
            field: [(cell.flops(step), values[step]) for step in sorted(values)] for field, values in value_at.items()
        }
        if any(points.values()):
            curves.append(RunCurves(entry=cell.entry, seed=cell.seed, points=points))
    return curves


def read_context_auc(run_dir: Path, after: int, step: int) -> Measured | None:
    """Return the context AUC of a run's last evaluation up to a step; None before the run has got to that step.

    Args:
        run_dir: folder of the run.
        after: evaluations after this step or earlier do not count; it is the checkpoint before the one in question.
        step: step of the checkpoint in question. The last step of a run always has an evaluation of its own; an
            earlier checkpoint gets the evaluation at or before it, as soon as there is one at or after it.

    Returns:
        The value with its standard error; also None if the run has no such evaluation between the two steps.
    """
    latest: Measured | None = None
    last_step = 0
    for record in iter_records(run_dir / METRICS_FILE, containing=b'"context_auc"'):
        last_step = max(last_step, record.get("step", 0))
        value = record.get("context_auc")
        is_due = after < record.get("step", 0) <= step
        if not is_due or value is None or not math.isfinite(value):
            continue
        error = record.get("context_auc_se")
        is_known = error is not None and math.isfinite(error)
        latest = Measured(value=value, standard_error=error if is_known else None)
    return latest if last_step >= step else None
