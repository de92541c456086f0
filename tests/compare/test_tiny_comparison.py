"""The comparisons in configs/ for hours of CPU cores: equal FLOPs, and arms that differ in what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import Plan, make_plan
from electra_dist.compare.learning_rates import RateSearch
from electra_dist.config.load import load_config, load_section

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_four_arms_have_equal_flops_and_the_temperatures_and_weights_of_their_names() -> None:
    file = CONFIGS / "compare_tiny_rtd.yaml"
    compare = load_section(file, CompareConfig)
    plan = make_plan(compare, file)
    tiny = load_config(CONFIGS / "tiny_rtd.yaml")

    assert [run.name for run in plan.runs[:4]] == [
        "rtd-curriculum-seed1",
        "mlm-seed1",
        "rtd-seed1",
        "rtd-curriculum-mlm-seed1",
    ]
    for run in plan.runs:
        assert run.flops(run.marks[-1]) == pytest.approx(plan.budget_flops, rel=1e-3)
        assert run.config.model == tiny.model
        warmup_share = run.config.optimizer.warmup_steps / run.config.train.num_steps
        assert warmup_share == pytest.approx(0.05, abs=1e-4)
    objective_of = {run.entry: run.config.objective for run in plan.runs}
    assert objective_of["rtd-curriculum"] == tiny.objective
    assert objective_of["rtd"] == tiny.objective.model_copy(update={"temperature": 1.0})
    assert objective_of["mlm"].name == "mlm"
    assert objective_of["rtd-curriculum-mlm"] == tiny.objective.model_copy(update={"discriminator_mlm_weight": 1.0})
    assert compare.criterion is not None
    assert plan.runs[0].config.train.num_steps == tiny.train.num_steps == compare.steps


def test_the_two_temperatures_are_compared_in_runs_of_equal_length() -> None:
    file = CONFIGS / "compare_temperatures.yaml"
    plan = make_plan(load_section(file, CompareConfig), file)
    tiny = load_config(CONFIGS / "tiny_rtd.yaml")

    objective_of = {run.entry: run.config.objective for run in plan.runs}
    assert objective_of["falling"] == tiny.objective
    assert objective_of["constant"] == tiny.objective.model_copy(update={"temperature": 1.0})
    assert [run.config.train.num_steps for run in plan.runs] == [2600] * 6
    assert {run.config.optimizer.warmup_steps for run in plan.runs} == {130}
    assert {run.config.log.eval_every_steps for run in plan.runs} == {200}


def worth(name: str, num_objectives: int | None = None) -> tuple[CompareConfig, Plan]:
    """Return a comparison in configs/ and its runs, of its first objectives only."""
    file = CONFIGS / name
    compare = load_section(file, CompareConfig)
    compare = compare.model_copy(update={"objectives": compare.objectives[:num_objectives]})
    return compare, make_plan(compare, file)


def runs_of(compare: CompareConfig, plan: Plan) -> dict[str, str]:
    """Return the identity of each run of a comparison, the short ones among them, by its name."""
    search = RateSearch(compare, CONFIGS / "any.yaml").plan
    assert search is not None
    return {run.name: run.config.identity_sha256() for run in (*search.runs, *plan.runs)}


def test_arms_that_are_added_behind_others_change_no_run_of_these() -> None:
    everything = runs_of(*worth("compare_worth.yaml"))
    for num_objectives in (2, 4):
        fewer = runs_of(*worth("compare_worth.yaml", num_objectives))
        assert len(fewer) == num_objectives * (3 + 3)  # learning rates and seeds
        assert fewer.items() <= everything.items()


def test_the_comparison_of_an_evening_makes_runs_of_the_whole_one() -> None:
    evening = runs_of(*worth("compare_worth_evening.yaml"))

    assert set(evening) == {
        *(f"{objective}-lr{rate}-seed1" for objective in ("rtd", "mlm") for rate in ("0.0005", "0.001", "0.002")),
        "rtd-seed1",
        "mlm-seed1",
    }
    assert evening.items() <= runs_of(*worth("compare_worth.yaml")).items()


def test_the_small_comparison_differs_from_the_whole_one_in_its_budget_and_its_chosen_rates() -> None:
    small, small_plan = worth("compare_worth_small.yaml")
    whole, whole_plan = worth("compare_worth.yaml")

    assert small.criterion == whole.criterion and small.seeds == whole.seeds
    run_of = {run.name: run.config for run in whole_plan.runs}
    rates = {entry.name: entry.lr for entry in whole.objectives}
    for run in small_plan.runs:
        same = run_of[run.name]
        assert (run.config.objective, run.config.model) == (same.objective, same.model)
        assert (run.config.data, run.config.corpus) == (same.data, same.corpus)
        assert run.config.optimizer.lr in rates[run.entry]
        # Warm-up is the same share of the steps.
        share = run.config.train.num_steps / same.train.num_steps
        assert share == pytest.approx(2000 / 7500, rel=1e-3)
        assert run.config.optimizer.warmup_steps == pytest.approx(share * same.optimizer.warmup_steps, abs=1)


def test_the_arms_on_modernberts_layers_search_their_rates_and_differ_in_what_their_names_say() -> None:
    compare, plan = worth("compare_worth.yaml")
    base = load_config(CONFIGS / "compare_worth_base.yaml")

    assert all(len(entry.lr) >= 3 for entry in compare.objectives)
    rtd, mlm, falling, joint, rtd_muon, mlm_muon = (run.config for run in plan.runs[:6])
    assert rtd.objective == base.objective
    assert (rtd.objective.temperature, rtd.objective.mask_prob) == (1.0, 0.2)
    assert mlm.objective == base.objective.model_copy(update={"name": "mlm"})
    assert falling.objective.model_copy(update={"mask_prob": 0.2}) == mlm.objective
    assert joint.objective == base.objective.model_copy(update={"discriminator_mlm_weight": 1.0})
    assert joint.model == base.model.model_copy(update={"sharing": "gdes"})
    for by_muon, by_adamw in ((rtd_muon, rtd), (mlm_muon, mlm)):
        assert by_muon.optimizer == by_adamw.optimizer.model_copy(update={"name": "muon"})
        assert (by_muon.objective, by_muon.model) == (by_adamw.objective, by_adamw.model)
    for run in plan.runs:
        assert run.flops(run.marks[-1]) == pytest.approx(plan.budget_flops, rel=1e-3)
        assert run.config.model.architecture == "modern"
        assert run.config.data.seq_len * run.config.train.global_batch == 2048
