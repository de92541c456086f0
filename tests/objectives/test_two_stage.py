"""Training in two stages under the real engine, on one rank in this process.

In the first stage only the generator learns. Then its weights are copied to the discriminator, and only that learns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from support.real_runs import tiny_tree

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.stage_switch import Stages
from electra_dist.engine.state_fragments import held_fragments
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
GENERATOR_STEPS = 3  # steps of the first stage
NUM_STEPS = 6
SEED = 11
# The parameters of the generator, and the discriminator's parameters to which they are copied.
COPIED_PREFIXES = {
    "towers.generator.": "towers.discriminator.",
    "towers.embeddings.": "towers.discriminator_embeddings.",
}
# "towers.generator" without a dot is also a prefix of its head, towers.generator_head.
GENERATOR_PREFIXES = ("towers.generator", "towers.embeddings.")
NUM_HEAD_PARAMETERS = 5  # of the generator's head, which the discriminator does not have

Weights = dict[str, torch.Tensor]


class TwoStageRun(NamedTuple):
    """Losses and gradient norms of every step, and fp32 master weights at four points of the run."""

    losses: list[float]
    norms: list[float]
    at_start: Weights
    before_switch: Weights
    after_switch: Weights
    at_end: Weights


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    """A process group of one rank in this process."""
    init_distributed()


def two_stage_config(zero_stage: int, precision: str) -> Config:
    """A tiny run whose towers have equal sizes and share nothing."""
    tower = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    settings = {
        "model.generator": tower,
        "model.sharing": "none",
        "objective.generator_only_steps": GENERATOR_STEPS,
        "train.global_batch": 4,
        "train.micro_batch": 4,
        "train.precision": precision,
        "engine.zero_stage": zero_stage,
    }
    return Config.model_validate(tiny_tree("unused", "unused", **settings))


def master_weights(engine: Engine) -> Weights:
    """Copies of the fp32 master weights, by parameter name."""
    fragments = held_fragments(engine)
    return {fragment.name: fragment.views["master"].clone() for fragment in fragments}


def run_two_stages(zero_stage: int, precision: str, ids: torch.Tensor) -> TwoStageRun:
    """Train `NUM_STEPS` steps on one batch."""
    config = two_stage_config(zero_stage, precision)
    objective = build_objective(config.model, config.objective, SPECIAL, 3)
    engine = Engine(objective, config.train, config.engine, config.optimizer)
    stages = Stages(engine, config.objective.generator_only_steps)
    scales = 1 / objective.loss_counts(ids).sum(0)
    losses = []
    norms = []
    at_start = master_weights(engine)
    for step in range(NUM_STEPS):
        if step == GENERATOR_STEPS:
            before_switch = master_weights(engine)
        has_switched = stages.enter(step)
        assert has_switched == (step == GENERATOR_STEPS)
        if step == GENERATOR_STEPS:
            after_switch = master_weights(engine)
        out = engine.forward(StepInput(ids, torch.arange(len(ids)), step, SEED, *scales))
        engine.backward(out.loss)
        norm = engine.step(1e-3)[0]
        losses.append(out.loss.item())
        norms.append(norm)
    at_end = master_weights(engine)
    engine.close()
    return TwoStageRun(losses, norms, at_start, before_switch, after_switch, at_end)


FINISHED_RUNS: dict[tuple[int, str], TwoStageRun] = {}


@pytest.fixture
def two_stage_run(make_ids: Callable[..., torch.Tensor]) -> Callable[..., TwoStageRun]:
    """A function that returns the run of a ZeRO stage and precision; each run is computed once for all tests."""

    def run_once(zero_stage: int, precision: str = "fp32") -> TwoStageRun:
        key = (zero_stage, precision)
        if key not in FINISHED_RUNS:
            ids = make_ids([32, 30, 32, 25], seq_len=32)
            FINISHED_RUNS[key] = run_two_stages(zero_stage, precision, ids)
        return FINISHED_RUNS[key]

    return run_once


def equal_copies(weights: Weights) -> set[str]:
    """The generator's parameters whose counterpart in the discriminator is equal bit for bit."""
    names = set()
    for generator_prefix, discriminator_prefix in COPIED_PREFIXES.items():
        for name in weights:
            if not name.startswith(generator_prefix):
                continue
            counterpart = discriminator_prefix + name.removeprefix(generator_prefix)
            if torch.equal(weights[name], weights[counterpart]):
                names.add(name)
    return names


def changed_names(earlier: Weights, later: Weights) -> set[str]:
    """The parameters that differ between two points of a run."""
    return {name for name in earlier if not torch.equal(earlier[name], later[name])}


def generator_names(weights: Weights) -> set[str]:
    """The parameters of the generator, its head and its embeddings."""
    return {name for name in weights if name.startswith(GENERATOR_PREFIXES)}


def test_the_generator_learns_then_is_copied_to_the_discriminator_then_only_that_learns(
    two_stage_run: Callable[..., TwoStageRun],
) -> None:
    run = two_stage_run(1)

    generator = generator_names(run.at_start)
    discriminator = run.at_start.keys() - generator
    assert changed_names(run.at_start, run.before_switch) == generator
    copies = equal_copies(run.after_switch)
    assert len(copies) == len(generator) - NUM_HEAD_PARAMETERS
    assert len(copies) > len(equal_copies(run.before_switch))
    for name in generator:
        assert torch.equal(run.before_switch[name], run.after_switch[name])
    assert changed_names(run.after_switch, run.at_end) == discriminator

    first_stage_losses = run.losses[:GENERATOR_STEPS]
    second_stage_losses = run.losses[GENERATOR_STEPS:]
    assert first_stage_losses[-1] < first_stage_losses[0]
    assert second_stage_losses[-1] < second_stage_losses[0]


@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")])
def test_losses_norms_and_copies_of_both_stages_are_those_of_zero_stage_1_in_fp32(
    zero_stage: int, precision: str, two_stage_run: Callable[..., TwoStageRun]
) -> None:
    if precision == "fp32":
        loss_tolerance = {"abs": 2e-5}
        norm_tolerance = {"rel": 2e-4}
    else:
        loss_tolerance = {"rel": 0.02}
        norm_tolerance = {"rel": 0.05}

    run = two_stage_run(zero_stage, precision)
    expected = two_stage_run(1)

    assert run.losses == pytest.approx(expected.losses, **loss_tolerance)
    assert run.norms == pytest.approx(expected.norms, **norm_tolerance)
    assert len(equal_copies(run.after_switch)) > len(equal_copies(run.before_switch))
    for name in generator_names(run.at_end):
        assert torch.equal(run.before_switch[name], run.at_end[name])
