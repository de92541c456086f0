"""Properties of every objective: it has the loss of a float64 computation, and the gradients of that loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import is_candidate
from support.float64_truth import Truth, shaken
from support.small_models import frozen_weights

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.masking import mask_rows

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SEED = 99
STEP = 1234
VOCAB_SIZE = 300
SEQ_LEN = 48
TOKEN_COUNTS = np.random.default_rng(0).integers(0, 1000, VOCAB_SIZE)  # of the corpus, for the unigram generator
LARGE_TOWER = TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
SMALL_TOWER = TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32)


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """An objective and a kind of sharing, as the fields of both config sections that differ from the defaults."""

    objective_fields: dict[str, Any]
    model_fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self) -> ModelConfig:
        """The config of two small towers without dropout."""
        defaults = {
            "vocab_size": VOCAB_SIZE,
            "max_positions": 64,
            "embedding_size": 24,
            "discriminator": LARGE_TOWER,
            "generator": SMALL_TOWER,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        return ModelConfig(**{**defaults, **self.model_fields})

    def module(self, backend: str = "auto") -> Any:
        """The objective, with noise on every parameter so that none is at its default."""
        objective = ObjectiveConfig(mask_prob=0.25, **self.objective_fields)
        module = shaken(build_objective(self.model(), objective, SPECIAL, 3, backend, TOKEN_COUNTS))
        if objective.generator == "frozen":
            module.frozen_generator.load_state_dict(frozen_weights(self.model()))
        return module


CASES = {
    "rtd": FamilyCase({}),
    "rtd-untied": FamilyCase({}, {"sharing": "none", "generator_embedding_size": 16}),
    "rtd-gdes": FamilyCase({}, {"sharing": "gdes"}),
    "rtd-one-set-of-layers": FamilyCase({}, {"sharing": "all", "generator": LARGE_TOWER}),
    "rtd-uniform": FamilyCase({"generator": "uniform"}),
    "rtd-unigram": FamilyCase({"generator": "unigram", "temperature": 2.0}),
    "rtd-frozen": FamilyCase({"generator": "frozen"}, {"sharing": "none", "generator_embedding_size": 16}),
    "rtd-temperature": FamilyCase({"temperature": 2.0}),
    "rtd-joint-mlm": FamilyCase({"discriminator_mlm_weight": 3.0}),
    "rtd-joint-mlm-gdes": FamilyCase({"discriminator_mlm_weight": 3.0}, {"sharing": "gdes"}),
    "rtd-joint-mlm-uniform": FamilyCase({"discriminator_mlm_weight": 3.0, "generator": "uniform"}),
    "mlm": FamilyCase({"name": "mlm"}),
    "rtd_masked_only": FamilyCase({"name": "rtd_masked_only"}),
    "replace_mlm": FamilyCase({"name": "replace_mlm", "token_weight": 3.0}),
    "replace_mlm-gdes": FamilyCase({"name": "replace_mlm"}, {"sharing": "gdes"}),
    "all_tokens_mlm": FamilyCase({"name": "all_tokens_mlm", "token_weight": 3.0}),
    "all_tokens_mlm-gdes": FamilyCase({"name": "all_tokens_mlm"}, {"sharing": "gdes"}),
    "electric": FamilyCase({"name": "electric"}),
    "adversarial": FamilyCase({"name": "adversarial"}),
}
for_every_case = pytest.mark.parametrize("case_name", CASES)


class Batch(NamedTuple):
    """Token ids, [B, S], and the numbers of their rows within the global batch, [B]."""

    ids: torch.Tensor
    rows: torch.Tensor

    def step_input(self, scales: tuple[float, float], step: int = STEP) -> StepInput:
        """The input of one step over all rows, with the factors of both loss sums."""
        return StepInput(self.ids, self.rows, step, SEED, *scales)


@pytest.fixture
def batch(make_ids: Callable[..., torch.Tensor]) -> Batch:
    """Three rows; the last two end with padding."""
    ids = make_ids([SEQ_LEN, 33, 20], seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    return Batch(ids, torch.tensor([40, 41, 42]))


def mean_scales(module: Any, ids: torch.Tensor) -> tuple[float, float]:
    """The factors that turn the two loss sums over `ids` into means over tokens."""
    first_count, second_count = module.loss_counts(ids).sum(0).tolist()
    return 1 / first_count, 1 / second_count


@for_every_case
def test_losses_and_counts_equal_a_float64_computation(case_name: str, batch: Batch) -> None:
    """`Truth` is written from the definitions with Hugging Face's encoders, without kernels of this project."""
    case = CASES[case_name]
    module = case.module()
    objective = module.objective
    first_scale, second_scale = mean_scales(module, batch.ids)

    out = module(batch.step_input((first_scale, second_scale)))
    truth = Truth(module, case.model(), batch.ids, batch.rows)
    first_loss, second_loss, discriminator_input = truth.losses(STEP, SEED)

    sums = Sums(*out.sums.tolist())
    has_token_loss = objective.name in ("replace_mlm", "all_tokens_mlm")
    if has_token_loss:
        second_sum = sums.token_loss_sum
        second_count = sums.token_weight
        second_weight = objective.token_weight
    else:
        second_sum = sums.rtd_loss_sum
        second_count = sums.rtd_weight
        second_weight = objective.rtd_weight
    assert sums.mlm_loss_sum == pytest.approx(first_loss, rel=2e-6)
    assert second_sum == pytest.approx(second_loss, rel=2e-6)

    # The value of the adversarial generator's surrogate loss has no meaning; only its gradient has.
    if objective.name != "adversarial":
        mlm_weight = 0.0 if objective.generator == "frozen" else objective.mlm_weight
        expected_loss = mlm_weight * first_loss * first_scale + second_weight * second_loss * second_scale
        if objective.discriminator_mlm_weight:
            joint_loss = truth.joint_mlm_loss(STEP, SEED)
            assert sums.token_loss_sum == pytest.approx(joint_loss, rel=2e-6)
            assert sums.token_weight == pytest.approx(1 / first_scale)
            expected_loss += objective.discriminator_mlm_weight * joint_loss * first_scale
        assert out.loss.item() == pytest.approx(expected_loss, rel=2e-6)
        assert sums.loss == out.loss.item()

    assert sums.tokens == (batch.ids != SPECIAL.pad).sum()
    if sums.mlm_weight != 0:  # 0: the objective has no such loss
        assert sums.mlm_weight == pytest.approx(1 / first_scale)
    if second_count != 0:
        assert second_count == pytest.approx(1 / second_scale)
    has_replacement_labels = objective.name not in ("mlm", "electric") and not has_token_loss
    if has_replacement_labels:
        assert torch.equal(out.label_BS, discriminator_input != batch.ids)


@for_every_case
def test_evaluation_adds_the_entropy_of_the_generator(case_name: str, batch: Batch) -> None:
    """The other sums are those of training mode at the same temperature, bit for bit."""
    case = CASES[case_name]
    module = case.module()
    trained = Sums(*module(batch.step_input((1.0, 1.0))).sums.tolist())
    with torch.no_grad():
        evaluated = Sums(*module.eval()(batch.step_input((1.0, 1.0))).sums.tolist())
    assert trained.entropy_sum == 0
    if module.objective.temperature == 1.0:  # the temperature of every evaluation
        assert evaluated._replace(entropy_sum=0.0, loss=0.0) == trained._replace(loss=0.0)
    if not hasattr(module.towers, "generator_head") and module.objective.generator != "frozen":
        assert evaluated.entropy_sum == 0
        return

    truth = Truth(module, case.model(), batch.ids, batch.rows)
    if case_name == "electric":
        log_probs = truth.cloze_log_probs()[is_candidate(batch.ids, SPECIAL)]
    else:
        masking = mask_rows(batch.ids, SPECIAL, module.objective, SEED, STEP, batch.rows)
        row, slot = (masking.weight_BN > 0).nonzero().T
        states = truth.states("generator", masking.input_BS)[row, masking.position_BN[row, slot]]
        log_probs = truth.token_log_probs("generator_head", states, truth.state["embeddings.word.weight"])
    entropy_sum = -(log_probs.exp() * log_probs).sum()
    assert evaluated.entropy_sum == pytest.approx(float(entropy_sum), rel=2e-6)
    assert len(log_probs) == evaluated.mlm_weight


@for_every_case
def test_given_replacements_get_the_logits_of_a_float64_discriminator(case_name: str, batch: Batch) -> None:
    """No generator runs, and positions and examples are those of the original rows."""
    case = CASES[case_name]
    module = case.module().eval()
    if module.objective.facts.predicts_tokens:
        assert not hasattr(module.towers, "discriminator_head")
        return
    shown = batch.ids.clone()
    shown[:, 5::7] = torch.randint(VOCAB_SIZE, shown[:, 5::7].shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = module(dataclasses.replace(batch.step_input((1.0, 1.0)), shown_BS=shown))
    truth = Truth(module, case.model(), batch.ids, batch.rows)
    expected = truth.detection_logits(truth.states("discriminator", shown))
    is_real = batch.ids != SPECIAL.pad
    torch.testing.assert_close(out.rtd_logit_BS[is_real].double(), expected[is_real], rtol=0, atol=2e-5)
    assert torch.equal(out.label_BS, shown != batch.ids)
    assert out.loss.item() == 0
    assert Sums(*out.sums.tolist()).mlm_weight == 0


@for_every_case
def test_gradients_are_the_slopes_of_the_loss(case_name: str, batch: Batch) -> None:
    """Central differences in float64, along a random direction of each part of the model.

    Left out are parts on which the loss also depends in ways whose gradient is stopped by definition.
    """
    module = CASES[case_name].module().double()
    if case_name == "adversarial":
        # The generator's surrogate loss depends on the discriminator's outputs, through which no gradient flows.
        module.objective = module.objective.model_copy(update={"mlm_weight": 0.0})
    parts_with_stopped_gradients = {
        "electric": ("generator", "embeddings"),
        "adversarial": ("generator", "embeddings", "baseline"),
    }
    skipped_prefixes = parts_with_stopped_gradients.get(module.objective.name, ())
    if module.towers.is_difference:
        skipped_prefixes = ("embeddings",)
    step_input = batch.step_input(mean_scales(module, batch.ids))
    parameters_of_part: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in module.towers.named_parameters():
        part = name.split(".")[0]
        parameters_of_part.setdefault(part, []).append(parameter)

    module(step_input).loss.backward()

    epsilon = 1e-6

    def move(parameters: list[torch.nn.Parameter], directions: list[torch.Tensor], distance: float) -> None:
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter += distance * direction

    num_checked = 0
    for part, parameters in parameters_of_part.items():
        if part.startswith(skipped_prefixes):
            continue
        directions = [torch.randn(p.shape, generator=torch.Generator().manual_seed(7)).double() for p in parameters]
        slope = 0.0
        for parameter, direction in zip(parameters, directions, strict=True):
            slope += (parameter.grad * direction).sum().item()
        with torch.no_grad():
            move(parameters, directions, epsilon)
            loss_above = module(step_input).loss.item()
            move(parameters, directions, -2 * epsilon)
            loss_below = module(step_input).loss.item()
            move(parameters, directions, epsilon)
        assert slope == pytest.approx((loss_above - loss_below) / (2 * epsilon), rel=1e-5, abs=1e-7), part
        assert slope != 0.0
        num_checked += 1
    assert num_checked >= 2


@for_every_case
def test_every_parameter_has_a_gradient(case_name: str, batch: Batch) -> None:
    """ZeRO fails on parameters without a gradient, and a parameter that is never trained wastes memory."""
    module = CASES[case_name].module()

    module(batch.step_input(mean_scales(module, batch.ids))).loss.backward()

    without_gradient = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            without_gradient.append(name)
    assert without_gradient == []


@for_every_case
def test_labels_and_sums_of_a_row_do_not_depend_on_the_other_rows_of_its_batch(case_name: str, batch: Batch) -> None:
    module = CASES[case_name].module()
    scales = (0.01, 0.01)
    first_row = Batch(batch.ids[:1], batch.rows[:1])
    other_rows = Batch(batch.ids[1:], batch.rows[1:])

    whole = module(batch.step_input(scales))
    first_part = module(first_row.step_input(scales))
    second_part = module(other_rows.step_input(scales))

    assert torch.equal(torch.cat([first_part.label_BS, second_part.label_BS]), whole.label_BS)
    torch.testing.assert_close(first_part.sums + second_part.sums, whole.sums, rtol=2e-6, atol=1e-6)


@for_every_case
def test_a_step_never_waits_for_values_of_the_device(case_name: str) -> None:
    """On the meta device there are no values: any `.item()`, boolean index or data-dependent shape raises."""
    module = CASES[case_name].module(backend="reference")
    module.to("meta")
    num_rows = 4
    ids = torch.zeros(num_rows, SEQ_LEN, dtype=torch.int64, device="meta")
    batch = Batch(ids, torch.arange(num_rows, device="meta"))

    counts = module.loss_counts(ids)
    out = module(batch.step_input((0.01, 0.01)))
    out.loss.backward()

    assert counts.shape == (num_rows, 2)
    assert out.sums.shape == (len(Sums._fields),)
    assert out.label_BS.shape == ids.shape
    assert out.rtd_logit_BS.shape == ids.shape


@for_every_case
def test_twelve_steps_on_one_batch_lower_the_loss(case_name: str, batch: Batch) -> None:
    """The module is deep-copied first, as tools do: parts that are shared must stay shared in the copy."""
    module = copy.deepcopy(CASES[case_name].module())
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    scales = mean_scales(module, batch.ids)

    losses = []
    for step in range(12):
        out = module(batch.step_input(scales, step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums = Sums(*out.sums.tolist())
        # The adversarial loss as a whole has no meaning; that of its discriminator has.
        is_adversarial = module.objective.name == "adversarial"
        losses.append(sums.rtd_loss_sum if is_adversarial else sums.loss)

    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


@for_every_case
def test_bf16_losses_are_within_5_percent_of_fp32(case_name: str, batch: Batch) -> None:
    """Under autocast and with bf16 parameters, for parameters that bf16 represents exactly."""
    module = CASES[case_name].module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    step_input = batch.step_input(mean_scales(module, batch.ids))

    in_fp32 = module(step_input)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = module(step_input)
    in_bf16 = module.bfloat16()(step_input)
    in_bf16.loss.backward()

    for out in (under_autocast, in_bf16):
        assert out.loss.dtype == torch.float32
        assert out.loss.item() == pytest.approx(in_fp32.loss.item(), rel=0.05)
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()
