"""The context AUC of a checkpoint, and the curves of all runs with their picture, from the records of the runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_plan import make_plan
from electra_dist.compare.run_evaluations import read_context_auc, read_curves
from electra_dist.compare.score_plot import write_curves
from electra_dist.config_file import load_section
from electra_dist.run.jsonl import Record


def write_metrics(run_dir: Path, *records: Record) -> None:
    """Write the records of a run to its metrics.jsonl."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_context_auc_of_a_checkpoint_is_that_of_the_last_evaluation_up_to_it(tmp_path: Path) -> None:
    records = [
        {"kind": "train", "step": 10, "grad_norm": 1.0},
        {"kind": "eval", "step": 10, "context_auc": 0.51, "context_auc_se": 0.01},
        {"kind": "eval", "step": 20, "context_auc": 0.55, "context_auc_se": 0.02},
        {"kind": "eval", "step": 30, "context_auc": "NaN"},
        {"kind": "eval", "step": 45, "context_auc": 0.6, "context_auc_se": 0.02},
    ]
    write_metrics(tmp_path, *records)

    measured = read_context_auc(tmp_path, after=10, step=35)

    assert measured is not None
    assert (measured.value, measured.standard_error) == (0.55, 0.02)
    assert read_context_auc(tmp_path, after=20, step=40) is None
    assert read_context_auc(tmp_path, after=40, step=50) is None  # the run has not got to step 50
    assert read_context_auc(tmp_path / "missing", after=0, step=40) is None


def test_curves_are_read_by_flops_and_a_repeated_step_counts_once(
    make_comparison: Callable[..., Path], tmp_path: Path
) -> None:
    file = make_comparison()
    cells = make_plan(load_section(file, CompareConfig), file).cells
    rtd, mlm = cells[0], cells[1]
    assert read_curves(cells) == []
    write_metrics(
        Path(rtd.config.run_dir),
        {"kind": "train", "step": 2, "mlm_loss": 9.0},
        {"kind": "eval", "step": 2, "mlm_loss": 8.0, "auc": float("nan"), "context_auc": 0.5},
        {"kind": "eval", "step": 4, "mlm_loss": 7.0, "auc": 0.6, "context_auc": 0.6},
        {"kind": "eval", "step": 4, "mlm_loss": 7.0, "auc": 0.6, "context_auc": 0.6},  # after a restart
    )
    write_metrics(Path(mlm.config.run_dir), {"kind": "eval", "step": 4, "mlm_loss": 7.5})

    of_rtd, of_mlm = read_curves(cells)

    assert (of_rtd.entry, of_rtd.seed, of_mlm.entry) == (rtd.entry, rtd.seed, mlm.entry)
    assert of_rtd.points["mlm_loss"] == [(rtd.flops(2), 8.0), (rtd.flops(4), 7.0)]
    assert of_rtd.points["auc"] == [(rtd.flops(4), 0.6)]
    assert of_mlm.points == {"mlm_loss": [(mlm.flops(4), 7.5)], "auc": [], "context_auc": []}
    for curves in ([of_rtd, of_mlm], [of_mlm]):
        write_curves(curves, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
