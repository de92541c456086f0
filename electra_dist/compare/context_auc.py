"""Reads the context AUC of a comparison's runs from the evaluations that the runs have recorded themselves.

The context AUC is the ROC-AUC of the model on held-out rows whose replaced tokens are drawn from the distribution of
single tokens in the corpus: word frequency alone gives 0.5, so what is above it was found in the context.
"""

from __future__ import annotations

import math
from pathlib import Path

from electra_dist.compare.measure import Measured
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.record_stream import iter_records

CONTEXT_AUC_METRIC = "ROC-AUC"


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
