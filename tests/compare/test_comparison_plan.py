"""Equal FLOPs, equal schedules, nothing else that tells the runs apart; and every mistake in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_plan import Plan, make_plan
from electra_dist.config import Config, TowerConfig
from electra_dist.config_file import load_config, load_section
from electra_dist.errors import UserError
from electra_dist.model.flops import run_flops, steps_of_flops
from launcher.cli.main import app

MakeComparison = Callable[..., Path]


def plan_of(file: Path) -> Plan:
    return make_plan(load_section(file, CompareConfig), file)


def forward_by_hand(tower: TowerConfig, width: int, seq_len: int) -> float:
    """Matrix products of a token: queries, keys, values and output; scores and mixture; the feed-forward layer."""
    h = tower.hidden_size
    layer = 4 * 2 * h * h + 2 * 2 * seq_len * h + 2 * 2 * h * tower.intermediate_size
    return tower.num_layers * layer + (2 * width * h if width != h else 0)


def step_flops_by_hand(config: Config) -> float:
    model, name, share = config.model, config.objective.name, config.objective.mask_prob
    width, h, vocab, seq_len = model.embedding_size, model.discriminator.hidden_size, 300, config.data.seq_len
    small = model.generator.hidden_size
    large_head = {
        "rtd": 2 * h * h + 2 * h,
        "mlm": share * (2 * h * width + 2 * width * vocab),
        "all_tokens_mlm": 2 * h * width + 2 * width * vocab + 2 * h,
    }[name]
    generator = forward_by_hand(model.generator, width, seq_len) + share * (2 * small * width + 2 * width * vocab)
    token = forward_by_hand(model.discriminator, width, seq_len) + large_head + (0 if name == "mlm" else generator)
    return 3 * token * config.train.global_batch * seq_len


def test_every_run_gets_the_flops_of_the_first_to_half_a_step(make_comparison: MakeComparison) -> None:
    plan = plan_of(make_comparison(objectives=["rtd", "mlm", "all_tokens_mlm"], steps=1000, seeds=[3, 4]))
    costs = {cell.entry: step_flops_by_hand(cell.config) for cell in plan.cells}
    assert plan.budget_flops == pytest.approx(1000 * costs["rtd"], rel=1e-12)
    for cell in plan.cells:
        num_steps = cell.config.train.num_steps
        assert cell.flops(num_steps) == pytest.approx(num_steps * costs[cell.entry], rel=1e-12)
        assert abs(num_steps * costs[cell.entry] - 1000 * costs["rtd"]) <= costs[cell.entry] / 2
        assert cell.marks == (round(0.5 * num_steps), num_steps)
        assert cell.config.optimizer.warmup_steps == round(num_steps * 10 / 20)  # the base's share
    steps = {cell.entry: cell.config.train.num_steps for cell in plan.cells}
    assert steps["all_tokens_mlm"] < steps["rtd"] < steps["mlm"]
    assert [(cell.entry, cell.seed) for cell in plan.cells[:3]] == [("rtd", 3), ("mlm", 3), ("all_tokens_mlm", 3)]


def test_a_budget_of_flops_and_the_two_stages_of_a_run(make_comparison: MakeComparison) -> None:
    by_steps = plan_of(make_comparison(steps=500))
    by_flops = plan_of(make_comparison(steps=None, flops=by_steps.budget_flops))
    assert [cell.config for cell in by_flops.cells] == [cell.config for cell in by_steps.cells]
    base = by_steps.cells[0].config
    model = base.model.model_copy(update={"sharing": "none", "generator": base.model.discriminator})
    two_stage = base.model_copy(
        update={"model": model, "objective": base.objective.model_copy(update={"generator_only_steps": 100})}
    )
    for num_steps in (1, 60, 100, 101, 400):
        assert steps_of_flops(two_stage, run_flops(two_stage, num_steps)) == num_steps
    assert run_flops(two_stage, 100) < run_flops(base, 200)


def test_an_entry_may_change_what_it_names_and_nothing_else(make_comparison: MakeComparison) -> None:
    other = {"name": "rtd-10", "objective": "rtd", "set": {"objective.rtd_weight": 10}}
    first, second = plan_of(make_comparison(objectives=["rtd", other])).cells
    assert second.config.objective.rtd_weight == 10
    assert second.config.run_dir.endswith("runs/rtd-10-seed1")
    same = {"run_dir": "", "objective": first.config.objective}
    assert first.config.model_copy(update=same) == second.config.model_copy(update=same)
    assert first.config.checkpoint.keep_steps == (4, 8)


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "no such objective": (
        {"objectives": ["rtd", "rdt"]},
        "comparison.yaml: `objectives.1.objective`: no such objective",
    ),
    "one objective": ({"objectives": ["rtd"]}, "`objectives`"),
    "one name twice": ({"objectives": ["rtd", "rtd"]}, "objectives need names of their own"),
    "two budgets": ({"flops": 1e9}, "give either `steps` or `flops`"),
    "no end": ({"evaluate_at": [0.5]}, "end with 1.0"),
    "unknown key": ({"task": {}}, "comparison.yaml: unknown key `task`; did you mean `tasks`?"),
    "unknown key of a task": ({"tasks": {"cola": {"max_trian": 3}}}, "did you mean `tasks.cola.max_train`?"),
    "no data": ({"tasks": {"cola": {}}}, "tasks.cola: no folder with data is given; pass --glue DIR"),
    "no such task": ({"tasks": {"colla": {"data": "x"}}}, "tasks.colla: not a GLUE task (cola, sst2"),
    "reserved key": (
        {"objectives": ["mlm", {"name": "rtd", "set": {"data.seq_len": 64}}]},
        "`data.seq_len` must be the same in all runs",
    ),
    "key of a run": (
        {"objectives": ["mlm", {"name": "rtd", "set": {"objective.rtd_wight": 1}}]},
        "objectives.rtd: --set: unknown key `objective.rtd_wight`; did you mean `objective.rtd_weight`?",
    ),
    "base": ({"base": "nowhere.yaml"}, "nowhere.yaml: no such config file"),
    "too short": ({"steps": 1}, "raise steps or flops"),
    "ranks": ({"ranks": 3}, "3 ranks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_starts(make_comparison: MakeComparison, mistake: str) -> None:
    changes, said = MISTAKES[mistake]
    file = make_comparison(**changes)
    result = CliRunner().invoke(app, ["compare", str(file)])
    assert isinstance(result.exception, UserError), result.output
    assert said in str(result.exception) and "\n" not in str(result.exception)
    assert not (file.parent / "out").exists()


def test_a_mistake_ends_with_78(make_comparison: MakeComparison) -> None:
    script = "from launcher.cli.main import main; main()"
    command = [sys.executable, "-c", script, "compare", str(make_comparison(steps=None))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert done.stderr.startswith("error: ") and "give either `steps` or `flops`" in done.stderr


def test_the_comparison_that_comes_with_the_project_is_whole() -> None:
    configs = Path(__file__).parents[2] / "configs"
    plan = plan_of(configs / "compare_cpu.yaml")
    assert {cell.entry for cell in plan.cells} == {"rtd", "mlm", "all_tokens_mlm", "rtd-uniform"}
    assert plan.cells[0].config.model == load_config(configs / "compare_cpu_base.yaml").model
    assert all(abs(cell.flops(cell.marks[-1]) / plan.budget_flops - 1) < 1e-3 for cell in plan.cells)
