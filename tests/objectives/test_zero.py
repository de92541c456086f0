"""The objective under DeepSpeed, one rank in this process: the tied table at every ZeRO stage."""

import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.engine.adamw import ForeachAdamW
from electra_dist.engine.process_group import init_distributed
from electra_dist.model.encoder import Encoder
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build_objective import build_objective

NUM_STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    init_distributed()


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return ForeachAdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)


def train(engine: Any, backward: Callable[..., None], step: Callable[[], None], ids: torch.Tensor) -> list[float]:
    """Losses of a few steps over one batch, with fresh masks each step."""
    module = getattr(engine, "module", engine)
    first, second = loss_counts(ids, module.special, module.objective).sum(0).tolist()
    losses = []
    for number in range(NUM_STEPS):
        out = engine(StepInput(ids, torch.arange(len(ids)), number, 11, 1 / first, 1 / second))
        backward(out.loss)
        step()
        losses.append(out.loss.item())
    return losses


def under_deepspeed(module: torch.nn.Module, stage: int, precision: str, ids: torch.Tensor) -> list[float]:
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
    with torch.no_grad():  # evaluation between steps reads the same partitioned parameters
        engine.eval()
        assert engine(StepInput(ids, torch.arange(len(ids)), 0, 11, 1.0, 1.0)).loss.isfinite()
    engine.destroy()
    return losses


def under_plain_torch(module: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    module = copy.deepcopy(module)
    optimizer = optimizer_of(module)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(module, torch.Tensor.backward, step, ids)


@pytest.fixture
def plain_losses(make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]) -> Any:
    objective, _ = make_model()
    ids = make_ids([64, 50, 64, 33], seq_len=64)
    return objective, ids, under_plain_torch(objective, ids)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_losses_equal_plain_torch(stage: int, plain_losses: Any) -> None:
    objective, ids, expected = plain_losses
    losses = under_deepspeed(objective, stage, "fp32", ids)
    assert losses == pytest.approx(expected, abs=2e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_generator_that_makes_its_gradients_early_gives_the_same_losses(stage: int, plain_losses: Any) -> None:
    objective, ids, expected = plain_losses
    early = copy.deepcopy(objective)
    early.early_generator = True
    assert under_deepspeed(early, stage, "fp32", ids) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_computed_again_give_the_same_losses(stage: int, plain_losses: Any) -> None:
    objective, ids, expected = plain_losses
    again = copy.deepcopy(objective)
    for module in again.modules():
        if isinstance(module, Encoder):
            module.recompute = True
    assert under_deepspeed(again, stage, "fp32", ids) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_losses_are_near_fp32(stage: int, plain_losses: Any) -> None:
    objective, ids, expected = plain_losses
    assert under_deepspeed(objective, stage, "bf16", ids) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("name", "sharing"),
    [
        ("mlm", "embeddings"),
        ("replace_mlm", "gdes"),
        ("all_tokens_mlm", "gdes"),
        ("electric", "embeddings"),
        ("adversarial", "none"),
        ("rtd", "all"),
    ],
)
def test_stage_3_gathers_what_each_objective_reads(
    name: Any, sharing: Any, make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    """Tables that heads are tied to are read outside the embeddings' own forward, again in backward."""
    _, model = make_model()
    fields = {**model.model_dump(), "sharing": sharing}
    if sharing == "all":
        fields["generator"] = fields["discriminator"]
    objective = build_objective(ModelConfig(**fields), ObjectiveConfig(name=name), special, 3)
    ids = make_ids([64, 50, 64, 33], seq_len=64)
    losses = under_deepspeed(objective, 3, "fp32", ids)
    assert losses == pytest.approx(under_plain_torch(objective, ids), abs=2e-5)
