"""The runs of a comparison have equal FLOPs and differ in their objective only; mistakes are one-line errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from typer.testing import CliRunner

from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import Plan, make_plan
from electra_dist.config import Config, TowerConfig
from electra_dist.config.load import load_config, load_section
from electra_dist.config.rules import check_new_run
from electra_dist.errors import UserError
from electra_dist.model.counts import run_flops, steps_of_flops

MakeComparison = Callable[..., Path]

EXIT_USER_ERROR = 78  # exit code of an error that the user must fix
VOCAB_SIZE = 300  # of the tiny corpus


def plan_of(file: Path) -> Plan:
    return make_plan(load_section(file, CompareConfig), file)


def tower_flops_by_hand(tower: TowerConfig, embedding_size: int, seq_len: int) -> float:
    """Return the forward FLOPs of the matrix products of one token in an encoder; an m x n matrix costs 2mn."""
    hidden = tower.hidden_size
    query_key_value_output = 4 * 2 * hidden * hidden
    scores_and_mixture = 2 * 2 * seq_len * hidden
    feed_forward = 2 * 2 * hidden * tower.intermediate_size
    layers = tower.num_layers * (query_key_value_output + scores_and_mixture + feed_forward)
    embedding_projection = 2 * embedding_size * hidden if embedding_size != hidden else 0
    return layers + embedding_projection


def step_flops_by_hand(config: Config) -> float:
    """Return the training FLOPs of one step: three times the forward FLOPs of the matrix products.

    This is an independent count: it does not call model/counts.py.
    """
    model = config.model
    objective = config.objective.name
    masked_share = config.objective.mask_prob
    embedding_size = model.embedding_size
    large_hidden = model.discriminator.hidden_size
    small_hidden = model.generator.hidden_size
    seq_len = config.data.seq_len

    detection_head = 2 * large_hidden * large_hidden + 2 * large_hidden
    vocabulary_head = 2 * large_hidden * embedding_size + 2 * embedding_size * VOCAB_SIZE
    copy_gate = 2 * large_hidden
    large_head = {
        "rtd": detection_head,
        "mlm": masked_share * vocabulary_head,
        "all_tokens_mlm": vocabulary_head + copy_gate,
    }[objective]
    token = tower_flops_by_hand(model.discriminator, embedding_size, seq_len) + large_head

    if objective != "mlm":  # MLM trains without a generator
        generator_head = 2 * small_hidden * embedding_size + 2 * embedding_size * VOCAB_SIZE
        token += tower_flops_by_hand(model.generator, embedding_size, seq_len) + masked_share * generator_head
    return 3 * token * config.train.global_batch * seq_len


def test_every_run_has_the_flops_of_the_first_objective_up_to_half_a_step(make_comparison: MakeComparison) -> None:
    plan = plan_of(make_comparison(objectives=["rtd", "mlm", "all_tokens_mlm"], steps=1000, seeds=[3, 4]))

    step_flops_of = {run.entry: step_flops_by_hand(run.config) for run in plan.runs}
    budget = 1000 * step_flops_of["rtd"]
    assert plan.budget_flops == pytest.approx(budget, rel=1e-12)
    for run in plan.runs:
        num_steps = run.config.train.num_steps
        step_flops = step_flops_of[run.entry]
        assert run.flops(num_steps) == pytest.approx(num_steps * step_flops, rel=1e-12)
        assert abs(num_steps * step_flops - budget) <= step_flops / 2
        assert run.marks == (round(0.5 * num_steps), num_steps)
        # The base config warms up for 10 of 20 steps; every run has the same share.
        assert run.config.optimizer.warmup_steps == round(num_steps * 10 / 20)
    num_steps_of = {run.entry: run.config.train.num_steps for run in plan.runs}
    assert num_steps_of["all_tokens_mlm"] < num_steps_of["rtd"] < num_steps_of["mlm"]
    first_runs = [(run.entry, run.seed) for run in plan.runs[:3]]
    assert first_runs == [("rtd", 3), ("mlm", 3), ("all_tokens_mlm", 3)]


def test_a_budget_in_flops_gives_the_plan_of_the_same_budget_in_steps_also_with_two_stages(
    make_comparison: MakeComparison,
) -> None:
    """In two-stage training the first steps train the generator alone and cost less than the later ones."""
    by_steps = plan_of(make_comparison(steps=500))
    by_flops = plan_of(make_comparison(steps=None, flops=by_steps.budget_flops))
    assert [run.config for run in by_flops.runs] == [run.config for run in by_steps.runs]

    base = by_steps.runs[0].config
    model = base.model.model_copy(update={"sharing": "none", "generator": base.model.discriminator})
    objective = base.objective.model_copy(update={"generator_only_steps": 100})
    two_stage = base.model_copy(update={"model": model, "objective": objective})
    for num_steps in (1, 60, 100, 101, 400):
        assert steps_of_flops(two_stage, run_flops(two_stage, num_steps)) == num_steps
    assert run_flops(two_stage, 100) < run_flops(base, 200)


def test_warm_ups_and_decay_keep_their_shares_and_fit_into_the_run(make_comparison: MakeComparison) -> None:
    """The base run has 20 steps. Both halves of 7 steps would be rounded to 4, which is a step too many."""
    shape = {"optimizer.shape": "trapezoid", "optimizer.warmup_steps": 10, "optimizer.decay_steps": 10}
    entry = {"name": "rtd", "set": {**shape, "optimizer.generator.warmup_steps": 5}}

    short_run, _ = plan_of(make_comparison(objectives=[entry, "mlm"], steps=7)).runs
    long_run, _ = plan_of(make_comparison(objectives=[entry, "mlm"], steps=2000)).runs

    for run, steps in ((short_run, (4, 3, 2)), (long_run, (1000, 1000, 500))):
        optimizer = run.config.optimizer
        assert (optimizer.warmup_steps, optimizer.decay_steps, optimizer.for_generator.warmup_steps) == steps
        check_new_run(run.config)


def test_an_entry_changes_the_keys_that_it_sets_and_nothing_else(make_comparison: MakeComparison) -> None:
    weighted = {"name": "rtd-10", "objective": "rtd", "set": {"objective.rtd_weight": 10}}

    plain_run, weighted_run = plan_of(make_comparison(objectives=["rtd", weighted])).runs

    assert weighted_run.config.objective.rtd_weight == 10
    assert weighted_run.config.run_dir.endswith("runs/rtd-10-seed1")
    same_keys = {"run_dir": "", "objective": plain_run.config.objective}
    assert plain_run.config.model_copy(update=same_keys) == weighted_run.config.model_copy(update=same_keys)
    assert plain_run.config.checkpoint.keep_steps == (4, 8)


def test_an_entry_may_set_a_schedule(make_comparison: MakeComparison) -> None:
    temperature = {"from": 4, "to": 1, "shape": "exponential", "tau": 0.15}
    curriculum = {"name": "rtd-curriculum", "objective": "rtd", "set": {"objective.temperature": temperature}}

    plain_run, scheduled_run = plan_of(make_comparison(objectives=["rtd", curriculum])).runs

    assert scheduled_run.config.identity()["objective"]["temperature"] == temperature
    assert scheduled_run.config.train == plain_run.config.train  # equal FLOPs give equally many steps


# Mistake -> (keys of the comparison's file that contain it, part of the error message).
MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "no such objective": (
        {"objectives": ["rtd", "rdt"]},
        "comparison.yaml: `objectives.1.objective`: no such objective",
    ),
    "one objective": ({"objectives": ["rtd"]}, "`objectives`"),
    "two entries of one name": ({"objectives": ["rtd", "rtd"]}, "objectives need names of their own"),
    "two budgets": ({"flops": 1e9}, "give either `steps` or `flops`"),
    "no score at the end": ({"evaluate_at": [0.5]}, "end with 1.0"),
    "unknown key": ({"task": {}}, "comparison.yaml: unknown key `task`; did you mean `tasks`?"),
    "unknown key of a task": ({"tasks": {"cola": {"max_trian": 3}}}, "did you mean `tasks.cola.max_train`?"),
    "task without data": ({"tasks": {"cola": {}}}, "tasks.cola: no folder with data is given; pass --glue DIR"),
    "no such task": ({"tasks": {"colla": {"data": "x"}}}, "tasks.colla: colla: none of the tasks cola, sst2"),
    "reserved key": (
        {"objectives": ["mlm", {"name": "rtd", "set": {"data.seq_len": 64}}]},
        "`data.seq_len` cannot be changed for one objective",
    ),
    "unknown key of a run": (
        {"objectives": ["mlm", {"name": "rtd", "set": {"objective.rtd_wight": 1}}]},
        "objectives.rtd: --set: unknown key `objective.rtd_wight`; did you mean `objective.rtd_weight`?",
    ),
    "missing base config": ({"base": "nowhere.yaml"}, "nowhere.yaml: no such config file"),
    "too few steps": ({"steps": 1}, "raise steps or flops"),
    "ranks that do not divide the batch": ({"ranks": 3}, "3 ranks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_a_one_line_error_and_nothing_is_written(
    make_comparison: MakeComparison, mistake: str
) -> None:
    changes, expected_message = MISTAKES[mistake]
    file = make_comparison(**changes)

    result = CliRunner().invoke(app, ["compare", str(file)])

    assert isinstance(result.exception, UserError), result.output
    message = str(result.exception)
    assert expected_message in message
    assert "\n" not in message
    assert not (file.parent / "out").exists()


def test_the_command_ends_with_exit_code_78_and_one_error_line(make_comparison: MakeComparison) -> None:
    file = make_comparison(steps=None)  # neither `steps` nor `flops`
    script = "from electra_launcher.cli.main import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", script, "compare", str(file)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert "give either `steps` or `flops`" in done.stderr


def test_the_comparison_in_configs_plans_four_objectives_with_flops_equal_to_a_thousandth() -> None:
    configs = Path(__file__).parents[2] / "configs"

    plan = plan_of(configs / "compare_cpu.yaml")

    assert {run.entry for run in plan.runs} == {"rtd", "mlm", "all_tokens_mlm", "rtd-uniform"}
    assert plan.runs[0].config.model == load_config(configs / "compare_cpu_base.yaml").model
    for run in plan.runs:
        last_step = run.marks[-1]
        assert abs(run.flops(last_step) / plan.budget_flops - 1) < 1e-3
