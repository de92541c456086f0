"""Every objective against float64 truth; its gradients against differences; what holds for all of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.float64_truth import Truth, shaken

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, Sums, loss_counts
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SEED, STEP, VOCAB, SEQ_LEN = 99, 1234, 300, 48
COUNTS = np.random.default_rng(0).integers(0, 1000, VOCAB)


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    objective: dict[str, Any]
    model: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, backend: str = "auto") -> tuple[Any, ModelConfig]:
        towers = {
            "discriminator": TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64),
            "generator": TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32),
        }
        rest = {"embedding_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        model = ModelConfig(vocab_size=VOCAB, max_positions=64, **{**towers, **rest, **self.model})
        objective = ObjectiveConfig(mask_prob=0.25, **self.objective)
        return shaken(build_objective(model, objective, SPECIAL, 3, backend, COUNTS)), model


SAME = {"generator": TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)}
CASES = {
    "rtd": FamilyCase({}),
    "rtd-untied": FamilyCase({}, {"sharing": "none", "generator_embedding_size": 16}),
    "rtd-gdes": FamilyCase({}, {"sharing": "gdes"}),
    "rtd-one-set-of-layers": FamilyCase({}, {**SAME, "sharing": "all"}),
    "rtd-uniform": FamilyCase({"generator": "uniform"}),
    "rtd-unigram": FamilyCase({"generator": "unigram", "temperature": 2.0}),
    "rtd-temperature": FamilyCase({"temperature": 2.0}),
    "mlm": FamilyCase({"name": "mlm"}),
    "rtd_masked_only": FamilyCase({"name": "rtd_masked_only"}),
    "replace_mlm": FamilyCase({"name": "replace_mlm", "token_weight": 3.0}),
    "replace_mlm-gdes": FamilyCase({"name": "replace_mlm"}, {"sharing": "gdes"}),
    "all_tokens_mlm": FamilyCase({"name": "all_tokens_mlm", "token_weight": 3.0}),
    "all_tokens_mlm-gdes": FamilyCase({"name": "all_tokens_mlm"}, {"sharing": "gdes"}),
    "electric": FamilyCase({"name": "electric"}),
    "adversarial": FamilyCase({"name": "adversarial"}),
}
all_cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def batch(make_ids: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return make_ids([SEQ_LEN, 33, 20], seq_len=SEQ_LEN, vocab_size=VOCAB), torch.tensor([40, 41, 42])


def scales_of(module: Any, ids: torch.Tensor) -> tuple[float, float]:
    first, second = loss_counts(ids, SPECIAL, module.objective).sum(0).tolist()
    return 1 / first, 1 / second


@all_cases
def test_loss_equals_a_float64_computation(name: str, batch: Any) -> None:
    (module, model), (ids, rows) = CASES[name].build(), batch
    scales = scales_of(module, ids)
    out = module(StepInput(ids, rows, STEP, SEED, *scales))
    first, second, read = Truth(module, model, ids, rows).losses(STEP, SEED)
    sums, objective = Sums(*out.sums.tolist()), module.objective
    predicts = objective.name in ("replace_mlm", "all_tokens_mlm")
    found = (sums.mlm_loss_sum, sums.token_loss_sum if predicts else sums.rtd_loss_sum)
    assert found == pytest.approx((first, second), rel=2e-6)
    if objective.name != "adversarial":  # its generator's loss has a value without a meaning
        weight = objective.token_weight if predicts else objective.rtd_weight
        expected = objective.mlm_weight * first * scales[0] + weight * second * scales[1]
        assert out.loss.item() == pytest.approx(expected, rel=2e-6)
        assert sums.loss == out.loss.item()
    assert sums.tokens == (ids != 0).sum()
    counted = (sums.mlm_weight or 1 / scales[0], (sums.token_weight if predicts else sums.rtd_weight) or 1 / scales[1])
    assert counted == pytest.approx((1 / scales[0], 1 / scales[1]))
    if objective.name not in ("mlm", "electric") and not predicts:
        assert torch.equal(out.label_BS, read != ids)


@all_cases
def test_gradients_are_those_of_the_loss(name: str, batch: Any) -> None:
    """Along random directions of each part, in float64; stopped gradients are left out of the direction."""
    (module, _), (ids, rows) = CASES[name].build(), batch
    module.double()
    if name == "adversarial":  # a policy's surrogate is no function of the discriminator to its gradient
        module.objective = module.objective.model_copy(update={"mlm_weight": 0.0})
    run = functools.partial(module, StepInput(ids, rows, STEP, SEED, *scales_of(module, ids)))
    run().loss.backward()
    stopped = {"electric": ("generator", "embeddings"), "adversarial": ("generator", "embeddings", "baseline")}
    skip = stopped.get(module.objective.name, ())
    if module.towers.is_difference:
        skip = ("embeddings",)
    parts: dict[str, list[torch.nn.Parameter]] = {}
    for key, parameter in module.towers.named_parameters():
        parts.setdefault(key.split(".")[0], []).append(parameter)
    checked = 0
    for part, parameters in parts.items():
        if part.startswith(skip):
            continue
        directions = [torch.randn(p.shape, generator=torch.Generator().manual_seed(7)).double() for p in parameters]
        slope = sum((p.grad * d).sum().item() for p, d in zip(parameters, directions))
        values, epsilon = [], 1e-6
        with torch.no_grad():
            for sign in (1, -2, 1):
                for parameter, direction in zip(parameters, directions):
                    parameter += sign * epsilon * direction
                values.append(run().loss.item())
        assert slope == pytest.approx((values[0] - values[1]) / (2 * epsilon), rel=1e-5, abs=1e-7), part
        assert slope != 0.0
        checked += 1
    assert checked >= 2


@all_cases
def test_every_parameter_has_a_gradient(name: str, batch: Any) -> None:
    """ZeRO must find no gradient missing, and nothing is built for nothing."""
    (module, _), (ids, rows) = CASES[name].build(), batch
    module(StepInput(ids, rows, STEP, SEED, *scales_of(module, ids))).loss.backward()
    without = [key for key, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@all_cases
def test_a_row_gives_the_same_numbers_in_any_batch(name: str, batch: Any) -> None:
    (module, _), (ids, rows) = CASES[name].build(), batch
    whole = module(StepInput(ids, rows, STEP, SEED, 0.01, 0.01))
    parts = [module(StepInput(ids[p], rows[p], STEP, SEED, 0.01, 0.01)) for p in (slice(0, 1), slice(1, 3))]
    assert torch.equal(torch.cat([part.label_BS for part in parts]), whole.label_BS)
    torch.testing.assert_close(sum(part.sums for part in parts), whole.sums, rtol=2e-6, atol=1e-6)


@all_cases
def test_nothing_waits_for_the_device(name: str) -> None:
    """On the meta device there are no values: any `.item()`, boolean index or data-dependent shape raises."""
    module, _ = CASES[name].build("reference")
    module.to("meta")
    ids, rows = torch.zeros(4, SEQ_LEN, dtype=torch.int64, device="meta"), torch.arange(4, device="meta")
    assert loss_counts(ids, SPECIAL, module.objective).shape == (4, 2)
    out = module(StepInput(ids, rows, STEP, SEED, 0.01, 0.01))
    out.loss.backward()
    assert out.sums.shape == (len(Sums._fields),)
    assert out.label_BS.shape == out.rtd_logit_BS.shape == ids.shape


@all_cases
def test_a_few_steps_on_one_batch_lower_the_loss(name: str, batch: Any) -> None:
    (module, _), (ids, rows) = CASES[name].build(), batch
    module = copy.deepcopy(module)  # as tests and tools do: shared parts must stay shared
    optimizer, scales = torch.optim.AdamW(module.parameters(), lr=3e-3), scales_of(module, ids)
    losses = []
    for step in range(12):
        out = module(StepInput(ids, rows, step, SEED, *scales))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums = Sums(*out.sums.tolist())
        is_game = module.objective.name == "adversarial"
        losses.append(sums.rtd_loss_sum if is_game else sums.loss)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


@all_cases
def test_bf16_is_near_fp32(name: str, batch: Any) -> None:
    (module, _), (ids, rows) = CASES[name].build(), batch
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    scales = scales_of(module, ids)
    exact = module(StepInput(ids, rows, STEP, SEED, *scales))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(StepInput(ids, rows, STEP, SEED, *scales))
    low = module.bfloat16()(StepInput(ids, rows, STEP, SEED, *scales))
    low.loss.backward()
    for out in (mixed, low):
        assert out.loss.dtype == torch.float32
        assert out.loss.item() == pytest.approx(exact.loss.item(), rel=0.05)
    assert all(p.grad.isfinite().all() for p in module.parameters())
