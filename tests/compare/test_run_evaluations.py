"""The curves of all runs with their picture, from the records of the runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from support.run_records import EVAL, STEP

from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import make_plan
from electra_dist.compare.score_plot import read_curves, write_curves
from electra_dist.config.load import load_section
from electra_dist.run.metrics import EvalRecord
from electra_dist.run.records import Record, encode


def write_metrics(run_dir: Path, *records: Record) -> None:
    """Write the records of a run to its metrics.jsonl."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join(map(encode, records)))


def evaluation(step: int, **values: float) -> EvalRecord:
    """Return the record of an evaluation without a ROC-AUC."""
    return EVAL.model_copy(update={"step": step, "auc": math.nan, **values})


def test_curves_are_read_by_flops_and_a_repeated_step_counts_once(
    make_comparison: Callable[..., Path], tmp_path: Path
) -> None:
    file = make_comparison()
    runs = make_plan(load_section(file, CompareConfig), file).runs
    rtd, mlm = runs[0], runs[1]
    assert read_curves(runs) == []
    write_metrics(
        Path(rtd.config.run_dir),
        STEP.model_copy(update={"step": 2, "mlm_loss": 9.0}),
        evaluation(2, mlm_loss=8.0, context_auc=0.5),
        evaluation(4, mlm_loss=7.0, auc=0.6, context_auc=0.6),
        evaluation(4, mlm_loss=7.0, auc=0.6, context_auc=0.6),  # after a restart
    )
    write_metrics(Path(mlm.config.run_dir), evaluation(4, mlm_loss=7.5))

    of_rtd, of_mlm = read_curves(runs)

    assert (of_rtd.entry, of_rtd.seed, of_mlm.entry) == (rtd.entry, rtd.seed, mlm.entry)
    assert of_rtd.points["mlm_loss"] == [(rtd.flops(2), 8.0), (rtd.flops(4), 7.0)]
    assert of_rtd.points["auc"] == [(rtd.flops(4), 0.6)]
    assert of_mlm.points == {"mlm_loss": [(mlm.flops(4), 7.5)], "auc": [], "context_auc": []}
    for curves in ([of_rtd, of_mlm], [of_mlm]):
        write_curves(curves, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
