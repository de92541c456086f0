"""Objectives over towers of the architecture `modern`: they train, split, recompute, compile and run under ZeRO."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from support.modern_models import SPECIAL, modern_model
from support.small_models import frozen_weights
from torch._dynamo.utils import counters

from electra_dist.config import Config, ModelConfig, ObjectiveConfig
from electra_dist.config.load import load_config
from electra_dist.engine.foreach_optimizers import ForeachAdamW
from electra_dist.engine.optimizer import parameter_groups
from electra_dist.engine.process_group import init_distributed
from electra_dist.model.encoder import Encoder, compile_layers
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

SEED = 11
CONFIGS = Path(__file__).parents[2] / "configs"
CASES = [
    ("rtd", "embeddings", {}),
    ("rtd", "all", {}),
    ("rtd", "gdes", {}),
    ("rtd_masked_only", "none", {}),
    ("mlm", "embeddings", {}),
    ("replace_mlm", "gdes", {}),
    ("all_tokens_mlm", "embeddings", {}),
    ("adversarial", "none", {}),
    ("rtd", "embeddings", {"discriminator_mlm_weight": 1.0}),
    ("rtd", "embeddings", {"generator": "frozen"}),
    ("rtd", "none", {"generator_only_steps": 2}),
]


@pytest.fixture
def ids(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return four rows of packed examples that are longer than the windows; two of the rows end with padding."""
    return make_ids([64, 50, 64, 33], seq_len=64)


def objective_of(name: Any = "rtd", settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return an initialised objective with towers of four and two layers; windows reach 4 tokens to each side."""
    layers = {"generator_layers": 4} if fields.get("sharing") == "all" or settings else {}
    model: ModelConfig = modern_model(**{"local_window": 8, **layers, **fields})
    objective = build_objective(model, ObjectiveConfig(name=name, **(settings or {})), SPECIAL, 3)
    if objective.objective.generator == "frozen":
        objective.frozen_generator.load_state_dict(frozen_weights(model))
    return objective.train()


def step_input(module: Any, ids: torch.Tensor, step: int = 0, rows: slice = slice(None)) -> StepInput:
    """Return the input of a micro-batch: some rows of a step, with the loss scales of the whole step."""
    scales = 1.0 / module.loss_counts(ids).sum(0)
    return StepInput(ids[rows], torch.arange(len(ids))[rows], step, SEED, *scales)


def loss_and_gradients(module: Any, ids: torch.Tensor, *parts: slice) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step that is computed in several micro-batches, and the gradients by parameter name."""
    module.zero_grad()
    loss = 0.0
    for rows in parts or (slice(None),):
        out = module(step_input(module, ids, rows=rows))
        out.loss.backward()
        loss += out.loss.item()
    return loss, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "sharing", "settings"), CASES)
def test_every_objective_reaches_every_parameter_and_lowers_its_loss(
    name: str, sharing: str, settings: dict[str, Any], ids: torch.Tensor
) -> None:
    objective = objective_of(name, settings, sharing=sharing)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = objective(step_input(objective, ids)).loss  # always step 0: the same masks and samples
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 1 and not objective.objective.generator_only_steps:
            for parameter_name, parameter in objective.named_parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name

    if name != "adversarial":  # whose loss has terms of both signs
        assert losses[-1] < losses[0]


def test_with_dropout_a_step_in_parts_is_the_whole_step(ids: torch.Tensor) -> None:
    objective = objective_of(hidden_dropout=0.2, attention_dropout=0.1).double()

    loss, gradients = loss_and_gradients(objective, ids)
    parts_loss, parts_gradients = loss_and_gradients(objective, ids, slice(0, 1), slice(1, 4))

    assert parts_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parts_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_recomputed_layers_give_gradients_equal_bit_for_bit(ids: torch.Tensor) -> None:
    objective = objective_of(hidden_dropout=0.1, attention_dropout=0.1)
    recomputing = copy.deepcopy(objective)
    for module in recomputing.modules():
        if isinstance(module, Encoder):
            module.recompute = True

    _, gradients = loss_and_gradients(objective, ids)
    _, recomputed = loss_and_gradients(recomputing, ids)

    assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())


def test_compiled_layers_match_eager_without_graph_breaks_or_recompilation(ids: torch.Tensor) -> None:
    objective = objective_of(attention_dropout=0.1)
    compiled = copy.deepcopy(objective)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled, backend="aot_eager")

    loss, gradients = loss_and_gradients(objective, ids)
    compiled_loss, compiled_gradients = loss_and_gradients(compiled, ids)
    with torch._dynamo.config.patch(error_on_recompile=True):
        loss_and_gradients(compiled, ids)

    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 4  # of each tower one with and one without a first norm
    assert compiled_loss == pytest.approx(loss, abs=2e-5)
    for name, gradient in gradients.items():
        assert (compiled_gradients[name] - gradient).abs().max() <= 2e-5 * max(1.0, gradient.abs().max().item()), name


@pytest.mark.sample
def test_all_graphs_of_training_and_evaluation_are_compiled(ids: torch.Tensor) -> None:
    """By default torch compiles eight graphs of a function and runs what is beyond eagerly, with a warning."""
    objective = objective_of()
    torch._dynamo.reset()
    counters.clear()
    compile_layers(objective, backend="aot_eager")

    loss_and_gradients(objective, ids)
    training = counters["stats"]["unique_graphs"]
    for num_rows in (1, 2, 3):
        with torch.no_grad():
            objective.eval()(step_input(objective, ids, rows=slice(num_rows)))

    # The evaluations had 1, 2 and 3 rows, and no gradients.
    assert counters["stats"]["unique_graphs"] == 4 * training > 8
    assert not counters["graph_break"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_under_zero_are_those_of_plain_torch(stage: int, recompute: bool, ids: torch.Tensor) -> None:
    init_distributed()
    plain = objective_of(sharing="gdes")
    under_zero = copy.deepcopy(plain)
    for module in under_zero.modules():
        if isinstance(module, Encoder):
            module.recompute = recompute

    def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
        return ForeachAdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)

    optimizer = optimizer_of(plain)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        loss = plain(step_input(plain, ids, step)).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    engine, *_ = deepspeed.initialize(
        model=under_zero,
        optimizer=optimizer_of(under_zero),
        config={
            "train_micro_batch_size_per_gpu": len(ids),
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        dist_init_required=False,
    )
    losses = []
    for step in range(3):
        out = engine(step_input(plain, ids, step))
        engine.backward(out.loss)
        engine.step()
        losses.append(out.loss.item())
    engine.destroy()

    assert losses == pytest.approx(expected, abs=2e-5)


def test_muon_takes_inner_values_and_gates_as_two_matrices() -> None:
    objective = objective_of()
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    matrices = {
        names[id(parameter)]: group["num_matrices"]
        for group in parameter_groups(objective, 0.01, use_muon=True)
        for parameter in group["params"]
        if "num_matrices" in group
    }
    assert {name for name, number in matrices.items() if number == 2} == {
        name for name in names.values() if name.endswith("gated_expand.weight")
    }
    assert matrices["towers.discriminator.layers.0.attention.qkv.weight"] == 3


def test_an_older_run_keeps_its_identity_and_the_architectures_have_different_ones() -> None:
    bert = load_config(CONFIGS / "base_size.yaml")
    keys = set(bert.identity()["model"])
    assert not keys & {"architecture", "global_every", "local_window", "global_rope_theta", "local_rope_theta"}
    same = load_config(CONFIGS / "base_size.yaml", ["model.architecture=bert", "model.local_window=64"])
    assert same.identity_sha256() == bert.identity_sha256()

    modern = load_config(CONFIGS / "modern_base.yaml")
    other = load_config(CONFIGS / "modern_base.yaml", ["model.local_window=64"])
    assert modern.identity()["model"]["architecture"] == "modern"
    assert len({bert.identity_sha256(), modern.identity_sha256(), other.identity_sha256()}) == 3


def test_modern_has_its_own_defaults_which_a_config_may_replace() -> None:
    model = modern_model()
    assert (model.hidden_dropout, model.attention_dropout, model.layer_norm_eps) == (0.0, 0.0, 1e-5)
    assert modern_model(hidden_dropout=0.1).hidden_dropout == 0.1
    assert ModelConfig(discriminator=model.discriminator, generator=model.generator).layer_norm_eps == 1e-12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.name=electric"], "electric needs attention in one direction"),
        (["engine.compile=true", "model.hidden_dropout=0.1"], "needs model.hidden_dropout: 0"),
        (["model.embedding_size=128"], "set model.embedding_size: 768"),
        (["model.generator.num_heads=256"], "heads of an even width"),
        (["model.local_window=1"], "local_window"),
    ],
)
def test_what_does_not_go_with_modern_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        load_config(CONFIGS / "modern_base.yaml", overrides)


def test_the_config_is_modernberts_shape_with_a_generator_that_can_be_exported() -> None:
    config: Config = load_config(CONFIGS / "modern_base.yaml")
    model = config.model
    assert (model.discriminator.num_layers, model.discriminator.hidden_size) == (22, 768)
    assert model.generator.hidden_size == model.embedding_size == 768
    assert model.discriminator.num_layers / model.generator.num_layers == pytest.approx(3, abs=0.2)
