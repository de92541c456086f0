"""Objectives under DeepSpeed on one rank in this process: every ZeRO stage gives the losses of plain PyTorch."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
from support.small_models import frozen_weights

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.engine.foreach_optimizers import ForeachAdamW
from electra_dist.engine.process_group import init_distributed
from electra_dist.model.encoder import Encoder
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective

NUM_STEPS = 4
SEED = 11
ROW_LENGTHS = [64, 50, 64, 33]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    """A process group of one rank in this process."""
    init_distributed()


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs in this file."""
    return ForeachAdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)


def train(engine: Any, backward: Callable[..., None], step: Callable[[], None], ids: torch.Tensor) -> list[float]:
    """Train `NUM_STEPS` steps on one batch, with fresh masks in each step; return the losses."""
    module = getattr(engine, "module", engine)
    first_count, second_count = module.loss_counts(ids).sum(0).tolist()
    losses = []
    for number in range(NUM_STEPS):
        out = engine(StepInput(ids, torch.arange(len(ids)), number, SEED, 1 / first_count, 1 / second_count))
        backward(out.loss)
        step()
        losses.append(out.loss.item())
    return losses


def losses_under_deepspeed(module: torch.nn.Module, stage: int, precision: str, ids: torch.Tensor) -> list[float]:
    """Losses of a copy of `module` in a DeepSpeed engine of a ZeRO stage."""
    module = copy.deepcopy(module)
    config = {
        "train_micro_batch_size_per_gpu": len(ids),
        "gradient_clipping": 0.0,  # on by default
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Without a threshold ZeRO-3 keeps parameters this small whole, and nothing would be gathered.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer_of(module), config=config, dist_init_required=False
    )
    losses = train(engine, engine.backward, engine.step, ids)
    check_evaluation(engine, ids)
    engine.destroy()
    return losses


def check_evaluation(engine: Any, ids: torch.Tensor) -> None:
    """Evaluate after the steps: the same partitioned parameters are read, also by the discriminator alone."""
    step_input = StepInput(ids, torch.arange(len(ids)), 0, SEED, 1.0, 1.0)
    with torch.no_grad():
        engine.eval()
        assert engine(step_input).loss.isfinite()
        if engine.module.objective.facts.predicts_tokens:
            return
        shown_input = dataclasses.replace(step_input, shown_BS=ids.roll(1, 1))
        alone = engine(shown_input).rtd_logit_BS
        evaluated_again = engine(step_input)
        alone_again = engine(shown_input).rtd_logit_BS
    assert alone.isfinite().all()
    assert torch.equal(alone, alone_again)
    assert Sums(*evaluated_again.sums.tolist()).entropy_sum > 0


def losses_under_plain_torch(module: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    """Losses of a copy of `module` with the same optimizer, but without an engine."""
    module = copy.deepcopy(module)
    optimizer = optimizer_of(module)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(module, torch.Tensor.backward, step, ids)


class PlainRun(NamedTuple):
    """An untrained RTD objective, a batch, and the losses of plain PyTorch on it."""

    objective: Any
    ids: torch.Tensor
    losses: list[float]


@pytest.fixture
def plain_run(make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]) -> PlainRun:
    """The run with which those under DeepSpeed are compared."""
    objective, _ = make_model()
    ids = make_ids(ROW_LENGTHS, seq_len=64)
    return PlainRun(objective, ids, losses_under_plain_torch(objective, ids))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_losses_at_every_zero_stage_are_those_of_plain_torch(stage: int, plain_run: PlainRun) -> None:
    losses = losses_under_deepspeed(plain_run.objective, stage, "fp32", plain_run.ids)

    assert losses == pytest.approx(plain_run.losses, abs=2e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputed_layers_under_deepspeed_give_the_losses_of_plain_torch(stage: int, plain_run: PlainRun) -> None:
    """Under ZeRO-3 the backward pass must gather a layer's parameters before it computes the layer again."""
    recomputing = copy.deepcopy(plain_run.objective)
    for module in recomputing.modules():
        if isinstance(module, Encoder):
            module.recompute = True

    losses = losses_under_deepspeed(recomputing, stage, "fp32", plain_run.ids)

    assert losses == pytest.approx(plain_run.losses, abs=2e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_losses_are_within_2_percent_of_fp32(stage: int, plain_run: PlainRun) -> None:
    losses = losses_under_deepspeed(plain_run.objective, stage, "bf16", plain_run.ids)

    assert losses == pytest.approx(plain_run.losses, rel=0.02)


@pytest.mark.parametrize(
    ("name", "sharing", "joint_mlm_weight"),
    [
        ("mlm", "embeddings", 0.0),
        ("replace_mlm", "gdes", 0.0),
        ("all_tokens_mlm", "gdes", 0.0),
        ("electric", "embeddings", 0.0),
        ("adversarial", "none", 0.0),
        ("rtd", "all", 0.0),
        ("rtd", "embeddings", 1.0),
    ],
)
def test_zero_stage_3_gathers_every_parameter_that_an_objective_reads(
    name: Any,
    sharing: Any,
    joint_mlm_weight: float,
    make_model: Callable[..., Any],
    make_ids: Callable[..., torch.Tensor],
    special: Any,
) -> None:
    """Heads read the tables they are tied to outside the embeddings' own forward pass, and again in backward."""
    _, rtd_model = make_model()
    fields = {**rtd_model.model_dump(), "sharing": sharing}
    if sharing == "all":
        fields["generator"] = fields["discriminator"]
    settings = ObjectiveConfig(name=name, discriminator_mlm_weight=joint_mlm_weight)
    objective = build_objective(ModelConfig(**fields), settings, special, 3)
    ids = make_ids(ROW_LENGTHS, seq_len=64)

    losses = losses_under_deepspeed(objective, 3, "fp32", ids)

    assert losses == pytest.approx(losses_under_plain_torch(objective, ids), abs=2e-5)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_a_frozen_generator_runs_at_every_zero_stage_and_is_in_no_optimizer(
    stage: int,
    precision: str,
    make_model: Callable[..., Any],
    make_ids: Callable[..., torch.Tensor],
    special: Any,
) -> None:
    """The engine does not see the generator, and the losses are those of plain PyTorch."""
    _, model = make_model()
    objective = build_objective(model, ObjectiveConfig(generator="frozen"), special, 3)
    objective.frozen_generator.load_state_dict(frozen_weights(model))
    ids = make_ids(ROW_LENGTHS, seq_len=64)

    losses = losses_under_deepspeed(objective, stage, precision, ids)

    tolerance = {"abs": 2e-5} if precision == "fp32" else {"rel": 0.02}
    assert losses == pytest.approx(losses_under_plain_torch(objective, ids), **tolerance)
    assert not any("generator" in name for name, _ in objective.named_parameters())
