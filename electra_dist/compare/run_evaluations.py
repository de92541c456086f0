"""Read the curves that the runs of a comparison have recorded at their own evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.compare.comparison_plan import Cell
from electra_dist.run.metrics import iter_evaluations

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
    A quantity that a run does not record has no points; values that are not finite are left out.
    """
    curves = []
    for cell in cells:
        value_at: dict[str, dict[int, float]] = {field: {} for field in CURVE_TITLES}  # by step
        for record in iter_evaluations(Path(cell.config.run_dir)):
            for field, values in value_at.items():
                value = getattr(record, field)
                if math.isfinite(value):
                    values[record.step] = value  # A step that was repeated after a restart counts once.
        points = {
            field: [(cell.flops(step), values[step]) for step in sorted(values)] for field, values in value_at.items()
        }
        if any(points.values()):
            curves.append(RunCurves(entry=cell.entry, seed=cell.seed, points=points))
    return curves
