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
    """Return the context AUC of a run's last evaluation up to a step, or None if there is none.

    Args:
        run_dir: folder of the run.
        after: evaluations after this step or earlier do not count; it is the checkpoint before the one in question.
        step: step of the checkpoint in question. The last step of a run always has an evaluation of its own; an
            earlier checkpoint gets the evaluation at or before it.
    """
    latest: Measured | None = None
    for record in iter_records(run_dir / METRICS_FILE, containing=b'"context_auc"'):
        value = record.get("context_auc")
        is_due = after < record.get("step", 0) <= step
        if not is_due or value is None or not math.isfinite(value):
            continue
        error = record.get("context_auc_se")
        is_known = error is not None and math.isfinite(error)
        latest = Measured(value=value, standard_error=error if is_known else None)
    return latest
