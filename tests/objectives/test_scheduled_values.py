"""Scheduled values in the forward pass: as plain numbers bit for bit, static shapes, and random replacements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.objectives.base import (
    ScheduledValues,
    Schedules,
    StepInput,
    StepOutput,
    Sums,
    evaluation_values,
)
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import RandomReplacements, ordinary_weights
from electra_dist.objectives.masking import mask_rows, num_masked, num_slots

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SEED = 5
STEP = 7
NUM_STEPS = 20
VOCAB_SIZE = 200
SEQ_LEN = 48
TOKEN_COUNTS = np.random.default_rng(0).integers(0, 100, VOCAB_SIZE)


def constant(value: float) -> dict[str, Any]:
    """Return a schedule that has the same value at every step."""
    return {"from": value, "to": value, "shape": "linear"}


def make_module(**objective_fields: Any) -> Any:
    """Return a small objective without dropout."""
    tower = TowerConfig(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=32)
    model = ModelConfig(
        vocab_size=VOCAB_SIZE,
        embedding_size=16,
        max_positions=64,
        discriminator=tower,
        generator=tower,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return build_objective(model, ObjectiveConfig(**objective_fields), SPECIAL, 3, count_V=TOKEN_COUNTS).train()


def run(module: Any, ids: torch.Tensor, values: ScheduledValues | None = None, step: int = STEP) -> StepOutput:
    """Return the output of a forward pass; the losses are means over the tokens of `ids`."""
    mask_prob = values.mask_prob if values else None
    counts = module.loss_counts(ids, mask_prob).sum(0)
    first_scale, second_scale = 1.0 / counts
    return module(StepInput(ids, torch.arange(len(ids)) + 3, step, SEED, first_scale, second_scale, scheduled=values))


@pytest.fixture
def ids(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Four rows, two of which end with padding."""
    return make_ids([SEQ_LEN, 40, SEQ_LEN, 21], seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("name", ["rtd", "mlm", "electric", "adversarial"])
def test_scheduled_values_give_the_bits_of_plain_numbers(name: str, ids: torch.Tensor) -> None:
    """At temperature 1, too, which has no path of its own."""
    for temperature, mlm_weight in [(1.0, 1.0), (1.7, 0.3)]:
        numbers = {"temperature": temperature, "mask_prob": 0.15, "mlm_weight": mlm_weight, "rtd_weight": 20.0}
        schedules = {key: constant(value) for key, value in numbers.items()}
        plain = make_module(name=name, **numbers)
        scheduled = make_module(name=name, **schedules)
        values = Schedules(scheduled.objective, NUM_STEPS).values(STEP)
        outputs = [run(plain, ids), run(scheduled, ids, values)]
        for output in outputs:
            output.loss.backward()
        for expected, found in zip(*outputs, strict=True):
            assert torch.equal(expected, found)
            assert expected.dtype == found.dtype
        for expected, found in zip(plain.parameters(), scheduled.parameters(), strict=True):
            assert (expected.grad is None) == (found.grad is None)
            assert expected.grad is None or torch.equal(expected.grad, found.grad)


def test_the_values_of_a_step_follow_their_schedules() -> None:
    objective = ObjectiveConfig(
        temperature={"from": 4, "to": 1, "shape": "exponential", "tau": 0.15},
        rtd_weight={"from": 0, "to": 50, "shape": "step", "over": 0.3},
    )
    schedules = Schedules(objective, NUM_STEPS)
    for step in range(NUM_STEPS):
        values = schedules.values(step)
        u = step / NUM_STEPS
        assert values.temperature == pytest.approx(1 + 3 * np.exp(-u / 0.15), rel=1e-14)
        assert values.rtd_weight == (0.0 if u < 0.3 else 50.0)
        assert values.mlm_weight == 1.0
        assert values.mask_prob == 0.25
    assert [step for step in range(NUM_STEPS) if schedules.jumps_at(step)] == [6]


def test_slots_are_those_of_the_largest_share_and_the_rest_has_weight_0(ids: torch.Tensor) -> None:
    objective = ObjectiveConfig(mask_prob={"from": 0.3, "to": 0.1, "shape": "linear"})
    schedules = Schedules(objective, NUM_STEPS)
    num_real = (ids != SPECIAL.pad).sum(1).numpy()
    for step in (0, 9, 19):
        share = schedules.values(step).mask_prob
        masking = mask_rows(ids, SPECIAL, objective, SEED, step, torch.arange(len(ids)), share)
        assert masking.position_BN.shape == (len(ids), int(0.305 * SEQ_LEN))
        expected = np.round(num_real * (0.3 - 0.2 * step / NUM_STEPS))
        assert masking.weight_BN.sum(1).tolist() == expected.tolist()
        assert num_masked(ids, SPECIAL, objective, share).tolist() == expected.tolist()
    assert num_slots(objective.mask_prob, SEQ_LEN) == num_slots(0.3, SEQ_LEN)


def test_masked_positions_do_not_depend_on_the_number_of_slots(ids: torch.Tensor) -> None:
    """At a scheduled share of 15 % the positions are those of a run with the plain number 0.15."""
    rows = torch.arange(len(ids))
    falling = ObjectiveConfig(mask_prob={"from": 0.4, "to": 0.15, "shape": "step", "over": 0.1})
    scheduled = mask_rows(
        ids, SPECIAL, falling, SEED, STEP, rows, Schedules(falling, NUM_STEPS).values(STEP).mask_prob
    )
    plain = mask_rows(ids, SPECIAL, ObjectiveConfig(mask_prob=0.15), SEED, STEP, rows)
    num_slots_of_plain = plain.position_BN.shape[1]
    assert torch.equal(scheduled.position_BN[:, :num_slots_of_plain], plain.position_BN)
    assert torch.equal(scheduled.weight_BN[:, :num_slots_of_plain], plain.weight_BN)
    assert scheduled.weight_BN[:, num_slots_of_plain:].sum() == 0
    assert torch.equal(scheduled.input_BS, plain.input_BS)


def test_evaluation_is_at_temperature_1_without_random_replacements(ids: torch.Tensor) -> None:
    curriculum = {
        "temperature": {"from": 4, "to": 2, "shape": "linear"},
        "random_share": {"from": 1, "to": 0.5, "shape": "linear"},
        "mask_prob": {"from": 0.15, "to": 0.25, "shape": "linear"},
    }
    scheduled = make_module(**curriculum).eval()
    constant_temperature = make_module(temperature=3.0).eval()
    plain = make_module().eval()
    for module in (scheduled, constant_temperature, plain):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(4)  # the logits are so large then that the temperature changes what is drawn
    expected = run(plain, ids)
    at_3 = dataclasses.replace(evaluation_values(plain.objective), temperature=3.0)
    assert not torch.equal(run(plain, ids, at_3).rtd_logit_BS, expected.rtd_logit_BS)
    for module in (scheduled, constant_temperature):
        found = run(module, ids, evaluation_values(module.objective))
        assert torch.equal(found.sums, expected.sums)
        assert torch.equal(found.rtd_logit_BS, expected.rtd_logit_BS)
        without_values = module(StepInput(ids, torch.arange(len(ids)) + 3, STEP, SEED, 1.0, 1.0))
        assert torch.equal(without_values.rtd_logit_BS, expected.rtd_logit_BS)


@pytest.mark.parametrize("random_from", ["uniform", "unigram"])
def test_random_replacements_are_drawn_from_ordinary_tokens(random_from: str, make_ids: Callable[..., Any]) -> None:
    num_rows = 400
    ids = make_ids([SEQ_LEN] * num_rows, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    module = make_module(random_share=1.0, random_from=random_from)
    out = run(module, ids)
    batch = module.batch(StepInput(ids, torch.arange(num_rows) + 3, STEP, SEED, 1.0, 1.0))
    corruption = module.corrupt(batch)
    assert torch.equal(corruption.label_BS, out.label_BS)
    assert torch.equal(corruption.label_BS, corruption.corrupted_BS != ids)  # a draw of the original is "original"
    is_masked = corruption.masking.slots_BS() > 0
    drawn = corruption.corrupted_BS[is_masked].numpy()
    weights = np.ones(VOCAB_SIZE) if random_from == "uniform" else TOKEN_COUNTS.astype(float)
    never = list(SPECIAL) if random_from == "uniform" else [SPECIAL.pad, SPECIAL.cls, SPECIAL.sep, SPECIAL.mask]
    weights[never] = 0
    expected = len(drawn) * weights / weights.sum()
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    degrees = (expected > 0).sum() - 1
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_the_share_of_random_replacements_follows_the_schedule_slot_by_slot(make_ids: Callable[..., Any]) -> None:
    """A slot's keyed word decides: the slots of a smaller share are among those of a larger one."""
    num_rows = 200
    ids = make_ids([SEQ_LEN] * num_rows, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    random = RandomReplacements(ordinary_weights(VOCAB_SIZE, SPECIAL), disallow_correct=True)
    rows = torch.arange(num_rows)
    target = ids[:, :16]
    marker = torch.full_like(target, -1)
    before = torch.zeros(target.shape, dtype=torch.bool)
    for share in (0.0, 0.2, 0.7, 1.0):
        mixed = random.mix(marker, target, share, rows, STEP, SEED)
        is_random = mixed != -1
        assert is_random.double().mean().item() == pytest.approx(share, abs=5 * np.sqrt(0.25 / target.numel()))
        assert not (before & ~is_random).any()
        assert not (mixed == target).any()
        part = random.mix(marker[50:], target[50:], share, rows[50:], STEP, SEED)
        assert torch.equal(part, mixed[50:])  # a row's draws depend on no other row
        before = is_random
    assert not torch.equal(random.mix(marker, target, 0.5, rows, STEP + 1, SEED) == -1, before)


def test_the_generators_loss_and_samples_do_not_change_with_random_replacements(ids: torch.Tensor) -> None:
    plain, mixed = run(make_module(), ids), run(make_module(random_share=0.5), ids)
    sums = [Sums(*output.sums.tolist()) for output in (plain, mixed)]
    assert sums[0].mlm_loss_sum == sums[1].mlm_loss_sum
    assert sums[0].sampled_correct == sums[1].sampled_correct
    assert not torch.equal(plain.rtd_logit_BS, mixed.rtd_logit_BS)  # the discriminator reads other tokens
    module = make_module(random_share={"from": 1, "to": 0, "shape": "step", "over": 0.1})
    after = run(module, ids, Schedules(module.objective, NUM_STEPS).values(STEP))
    assert torch.equal(after.sums, plain.sums)
