"""Two stages under the real engine, one rank in this process: the copy, the rest, one result at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.real_runs import tiny_tree

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.stage_switch import Stages
from electra_dist.engine.state_fragments import held_fragments
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FIRST, LAST = 3, 6
Run = tuple[list[float], list[float], list[dict[str, torch.Tensor]]]
DONE: dict[tuple[int, str], Run] = {}
PAIRS = {"towers.generator.": "towers.discriminator.", "towers.embeddings.": "towers.discriminator_embeddings."}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    init_distributed()


def engine_of(stage: int, precision: str) -> tuple[Engine, Config]:
    tower = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    settings = {
        "model.generator": tower,
        "model.sharing": "none",
        "objective.generator_only_steps": FIRST,
        "train.global_batch": 4,
        "train.micro_batch": 4,
        "train.precision": precision,
        "engine.zero_stage": stage,
    }
    config = Config.model_validate(tiny_tree("unused", "unused", **settings))
    return Engine(
        build_objective(config.model, config.objective, SPECIAL, 3), config.train, config.engine, config.optimizer
    ), config


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    held = held_fragments(engine.deepspeed.module, engine.optimizer)
    return {fragment.name: fragment.views["master"].clone() for fragment in held}


def copied(weights: dict[str, torch.Tensor]) -> list[str]:
    """Parameters of the generator that the discriminator has bit for bit."""
    pairs = [(n, b + n.removeprefix(a)) for a, b in PAIRS.items() for n in weights if n.startswith(a)]
    return [name for name, twin in pairs if torch.equal(weights[name], weights[twin])]


@pytest.fixture
def train(make_ids: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def run(stage: int, precision: str = "fp32") -> Run:
        if (stage, precision) not in DONE:
            DONE[stage, precision] = train_once(stage, precision)
        return DONE[stage, precision]

    def train_once(stage: int, precision: str) -> Run:
        engine, config = engine_of(stage, precision)
        ids, stages = make_ids([32, 30, 32, 25], seq_len=32), Stages(engine, config.objective)
        scales = 1 / loss_counts(ids, SPECIAL, config.objective).sum(0)
        losses, norms, seen = [], [], [masters(engine)]
        for step in range(LAST):
            assert stages.enter(step) == (step == FIRST)
            if step == FIRST:
                seen.append(masters(engine))
            out = engine.forward(StepInput(ids, torch.arange(4), step, 11, *scales))
            engine.backward(out.loss)
            norms.append(engine.step(1e-3)[0])
            losses.append(out.loss.item())
            seen.append(masters(engine))
        engine.close()
        return losses, norms, seen

    return run


def test_the_discriminator_rests_then_begins_as_the_generator_which_rests(train: Callable[..., Any]) -> None:
    losses, _, seen = train(1)
    start, before, switched, after = seen[0], seen[FIRST], seen[FIRST + 1], seen[-1]
    learning = {n for n in start if n.startswith(("towers.generator", "towers.embeddings."))}
    assert {n for n in start if not torch.equal(start[n], before[n])} == learning
    assert len(copied(switched)) == len(learning) - 5 > len(copied(before))  # all but the generator's head
    assert all(torch.equal(before[n], switched[n]) for n in learning)
    assert {n for n in start if not torch.equal(switched[n], after[n])} == start.keys() - learning
    assert losses[FIRST - 1] < losses[0]
    assert losses[-1] < losses[FIRST]


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")])
def test_every_zero_stage_computes_the_same(stage: int, precision: str, train: Callable[..., Any]) -> None:
    losses, norms, seen = train(stage, precision)
    expected, expected_norms, _ = train(1)
    tolerance = {"abs": 2e-5} if precision == "fp32" else {"rel": 0.02}
    assert losses == pytest.approx(expected, **tolerance)
    assert norms == pytest.approx(expected_norms, rel=2e-4 if precision == "fp32" else 0.05)
    assert len(copied(seen[FIRST + 1])) > len(copied(seen[FIRST]))
    rests = [n for n in seen[-1] if n.startswith(("towers.generator", "towers.embeddings."))]
    assert all(torch.equal(seen[FIRST][n], seen[-1][n]) for n in rests)
