"""The learning rate of an objective is the one whose short run is best on held-out rows, and is chosen once.

No run is started: a replaced `pretrain` records an evaluation in the folder of each short run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from electra_dist.compare import comparison_runs
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import PlannedRun
from electra_dist.compare.learning_rates import RATES_FILE, SEARCH_FOLDER, RateSearch
from electra_dist.config.load import load_config, load_section
from electra_dist.errors import UserError
from electra_dist.run.folder import CONFIG_FILE, IDENTITY_FILE
from electra_dist.store.json_file import canonical_json
from electra_dist.train.check_inputs import check_inputs

MakeComparison = Callable[..., Path]
CONTEXT_AUC = {0.001: 0.71, 0.002: 0.84, 0.004: 0.78}  # of rtd by its learning rate
LOSS = {0.001: 5.2, 0.002: 5.9, 0.004: math.nan}  # of mlm
RTD = {"name": "rtd", "lr": list(CONTEXT_AUC)}
MLM = {"name": "mlm", "lr": list(LOSS), "set": {"objective.mask_prob": 0.3}}


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> list[PlannedRun]:
    """The short runs that were made, to which each further one is appended; no other run can be made."""
    made: list[PlannedRun] = []

    def pretrain(planned: PlannedRun, ranks: int, pause: Any) -> str:
        run_dir = Path(planned.config.run_dir)
        if SEARCH_FOLDER not in run_dir.parts:
            return "no run of the comparison is made here"
        made.append(planned)
        rate = planned.config.optimizer.lr
        unknown = dict.fromkeys(("mlm_accuracy", "rtd_loss", "auc", "accuracy", "precision", "recall"), 0.0)
        loss = LOSS.get(rate, 4.0)
        record = {"kind": "eval", "step": 8, "rows": 8, **unknown, "mlm_loss": loss}
        if not planned.config.objective.facts.predicts_tokens:
            record["context_auc"] = CONTEXT_AUC[rate]
        run_dir.mkdir(parents=True, exist_ok=True)
        earlier = {**record, "step": 4, "context_auc": 0.99, "mlm_loss": 1.0}  # the newest evaluation counts
        (run_dir / "metrics.jsonl").write_text(f"{json.dumps(earlier)}\n{json.dumps(record)}\n")
        return ""

    monkeypatch.setattr(comparison_runs, "pretrain", pretrain)
    return made


@pytest.fixture
def make(make_comparison: MakeComparison, tiny_corpus: Path, tmp_path: Path) -> MakeComparison:
    """`make_comparison` with held-out rows."""

    def with_heldout(**changes: object) -> Path:
        file = make_comparison(**changes)
        base = yaml.safe_load((tmp_path / "base.yaml").read_text())
        base["data"]["heldout"] = f"{tiny_corpus}/heldout"
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
        return file

    return with_heldout


def run(file: Path) -> list[str]:
    """Make or continue a comparison; return its notes."""
    notes: list[str] = []
    Comparison(load_section(file, CompareConfig), file, None).run(lambda *_: None, notes.append)
    return notes


def rate_of(run_config: Path) -> float:
    rate: float = yaml.safe_load(run_config.read_text())["optimizer"]["lr"]
    return rate


def test_the_highest_context_auc_or_the_lowest_loss_of_a_short_run_decides(
    make: MakeComparison, short_runs: list[PlannedRun], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    notes = run(make(objectives=[RTD, MLM, "all_tokens_mlm"], steps=100, seeds=[7, 8], search_at=0.25))

    assert [(planned.entry, planned.seed) for planned in short_runs] == [
        (f"{objective}-lr{rate:g}", 7) for objective, rates in (("rtd", CONTEXT_AUC), ("mlm", LOSS)) for rate in rates
    ]
    assert short_runs[0].config.train.num_steps == 25
    assert short_runs[3].config.objective.mask_prob == 0.3  # what the objective itself changes
    for seed in (7, 8):
        assert rate_of(out / "runs" / f"rtd-seed{seed}.yaml") == 0.002
        assert rate_of(out / "runs" / f"mlm-seed{seed}.yaml") == 0.001  # the loss with 0.004 is not finite
    tree = json.loads((out / "compare.json").read_text())
    assert [(choice["entry"], choice["chosen"]) for choice in tree["learning_rates"]] == [
        ("rtd", 0.002),
        ("mlm", 0.001),
    ]
    assert tree["learning_rates"][1]["values"] == [5.2, 5.9, None]
    line = (
        "mlm: 0.001, by the loss on held-out rows (0.001 gives 5.2000, 0.002 gives 5.9000, 0.004 gives a failed run)"
    )
    assert f"learning rate of {line}" in notes
    assert line in (out / "compare.md").read_text()


def test_a_choice_holds_until_the_short_runs_would_be_others(
    make: MakeComparison, short_runs: list[PlannedRun], tmp_path: Path
) -> None:
    run(make(objectives=[RTD, MLM]))
    assert len(short_runs) == 6
    line_of_rtd = (tmp_path / "out" / RATES_FILE).read_text().splitlines()[0]

    run(make(objectives=[RTD, MLM], seeds=[1, 2]))
    assert len(short_runs) == 6  # another seed, the same short runs
    run(make(objectives=[RTD, {**MLM, "set": {"objective.mask_prob": 0.2}}]))
    assert [planned.entry for planned in short_runs[6:]] == ["mlm-lr0.001", "mlm-lr0.002", "mlm-lr0.004"]
    (tmp_path / "out" / RATES_FILE).write_text(line_of_rtd + "\n")  # as after an interrupt between two objectives
    run(make(objectives=[RTD, MLM]))
    assert [planned.entry for planned in short_runs[9:]] == ["mlm-lr0.001", "mlm-lr0.002", "mlm-lr0.004"]


def test_a_comparison_goes_on_with_a_run_that_was_begun_with_its_chosen_rate(
    make: MakeComparison, short_runs: list[PlannedRun], tmp_path: Path
) -> None:
    file = make(objectives=[RTD, "mlm"])
    run(file)
    planned = tmp_path / "out" / "runs" / "rtd-seed1.yaml"
    config = load_config(planned)
    assert config.optimizer.lr == 0.002 != RTD["lr"][0]
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_bytes(planned.read_bytes())
    (run_dir / IDENTITY_FILE).write_text(canonical_json(check_inputs(config, 1).identity))
    notes = run(file)
    assert notes and len(short_runs) == 3


def test_an_objective_whose_short_runs_all_fail_is_an_error_that_names_the_reasons(
    make: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_runs, "pretrain", lambda planned, *_: f"{planned.name} diverged")

    with pytest.raises(UserError, match=r"no learning rate of rtd can be .*: rtd-lr0.001-seed1 diverged; .* other"):
        run(make(objectives=[RTD, MLM]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"lr": [0.001]}, "two or more different ones"),
        ({"lr": [0.001, 0.001]}, "two or more different ones"),
        ({"lr": [0.001, 0.0]}, "lr"),
        ({"lr": [0.001, 0.002], "set": {"optimizer.lr": 0.1}}, "both give the learning rate"),
    ],
)
def test_rates_that_are_no_choice_are_an_error(make: MakeComparison, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_section(make(objectives=[{"name": "rtd", **entry}, "mlm"]), CompareConfig)


def test_rates_need_held_out_rows(make_comparison: MakeComparison, tmp_path: Path) -> None:
    file = make_comparison(objectives=[RTD, "mlm"])
    base = yaml.safe_load((tmp_path / "base.yaml").read_text())
    base["data"]["heldout"] = None
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))

    with pytest.raises(UserError, match=r"chosen on held-out rows; set `data.heldout` in base\.yaml"):
        Comparison(load_section(file, CompareConfig), file, None)


def test_rates_that_differ_in_the_seventh_digit_have_folders_of_their_own(make: MakeComparison) -> None:
    file = make(objectives=[{"name": "rtd", "lr": [0.001, 0.0010000001]}, "mlm"])
    plan = RateSearch(load_section(file, CompareConfig), file).plan
    assert plan is not None and len({planned.config.run_dir for planned in plan.runs}) == 2


def test_the_page_is_there_before_the_short_runs_and_names_the_objectives_without_a_rate(
    make: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(planned: PlannedRun, ranks: int, pause: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison_runs, "pretrain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(make(objectives=[RTD, MLM]))

    page = (tmp_path / "out" / "compare.html").read_text()
    assert "No learning rate has been chosen yet for rtd, mlm. 2 of 2 runs are not finished." in page
