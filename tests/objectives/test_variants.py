"""What defines each variant: where gradients go, what is frozen, what is drawn, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.float64_truth import shaken

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.errors import UserError
from electra_dist.model.row_layout import SpecialIds, derive
from electra_dist.model.token_log_probs import CHUNK_ROWS, token_log_probs
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective, check_objective
from electra_dist.objectives.frequency_generator import FixedGenerator, uniform_weights, unigram_weights
from electra_dist.objectives.masking import mask_rows

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SEED, STEP = 5, 77
TOWER = TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
SMALL = TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32)


def model_of(**fields: Any) -> ModelConfig:
    base = {"vocab_size": 300, "embedding_size": 24, "max_positions": 64, "discriminator": TOWER, "generator": SMALL}
    return ModelConfig(**{**base, "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields})


def build(model: dict[str, Any] | None = None, **objective: Any) -> Any:
    return shaken(build_objective(model_of(**(model or {})), ObjectiveConfig(**objective), SPECIAL, 3))


@pytest.fixture
def ids(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make_ids([48, 40, 33], seq_len=48)


def given(ids: torch.Tensor, step: int = STEP) -> StepInput:
    return StepInput(ids, torch.arange(len(ids)), step, SEED, 0.01, 0.01)


def run(module: Any, ids: torch.Tensor, step: int = STEP) -> Any:
    module.zero_grad()
    out = module(given(ids, step))
    if out.loss.requires_grad:
        out.loss.backward()
    return out


def gradient_of_states(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, S]: size of the loss's gradient with respect to the discriminator's last states."""
    kept = []

    def keep(_: Any, __: Any, states: torch.Tensor) -> None:
        states.retain_grad()
        kept.append(states)

    handle = module.towers.discriminator.register_forward_hook(keep)
    run(module, ids)
    handle.remove()
    return kept[-1].grad.abs().sum(-1)


def masked_positions(module: Any, ids: torch.Tensor) -> torch.Tensor:
    masking = mask_rows(ids, SPECIAL, module.objective, SEED, STEP, torch.arange(len(ids)))
    return torch.zeros(ids.shape).scatter_add(1, masking.position_BN, masking.weight_BN) > 0


@pytest.mark.parametrize("name", ["rtd_masked_only", "replace_mlm", "mlm"])
@pytest.mark.parametrize("masking", ["without_replacement", "reference"])
def test_no_gradient_comes_from_positions_that_were_not_masked(name: Any, masking: Any, ids: torch.Tensor) -> None:
    module = build(name=name, masking=masking)
    size, masked = gradient_of_states(module, ids), masked_positions(module, ids)
    assert (size[masked] > 0).all()
    assert not size[~masked].any()


@pytest.mark.parametrize("name", ["rtd", "all_tokens_mlm", "electric", "adversarial"])
def test_every_real_token_sends_a_gradient_elsewhere(name: Any, ids: torch.Tensor) -> None:
    size = gradient_of_states(build(name=name), ids)
    assert (size[ids != 0] > 0).all()
    assert not size[ids == 0].any()


def test_a_position_drawn_twice_weighs_double_in_electra_15(ids: torch.Tensor) -> None:
    module = build(name="rtd_masked_only", masking="reference", mask_prob=0.5)
    out = run(module, ids)
    masking = mask_rows(ids, SPECIAL, module.objective, SEED, STEP, torch.arange(len(ids)))
    times = torch.zeros(ids.shape).scatter_add(1, masking.position_BN, masking.weight_BN)
    assert times.max() >= 2
    right = torch.where(out.label_BS, out.rtd_logit_BS, -out.rtd_logit_BS).double()
    assert out.sums[6].item() == pytest.approx((torch.nn.functional.softplus(-right) * times).sum().item(), rel=1e-6)


def test_the_copy_gate_learns_to_copy_where_the_input_is_right(ids: torch.Tensor) -> None:
    """dL/dz of a copied token is (D(1-D)/p)(softmax - 1) <= 0: more copying; of a replaced one it is D > 0."""
    module = build(name="all_tokens_mlm", mlm_weight=0.0)
    gates: list[torch.Tensor] = []

    def keep(_: Any, __: Any, gate: torch.Tensor) -> None:
        gate.retain_grad()
        gates.append(gate)

    module.towers.copy_gate.register_forward_hook(keep)
    corrupted: list[torch.Tensor] = []
    module.towers.embeddings.word.register_forward_hook(lambda _, inputs, __: corrupted.append(inputs[0]))
    run(module, ids)
    slope = gates[0].grad.view(ids.shape) / 0.01
    is_copy, real = corrupted[-1] == ids, ids != 0
    assert (slope[real & is_copy] < 0).all()
    D = gates[0].detach().view(ids.shape).sigmoid()
    torch.testing.assert_close(slope[real & ~is_copy], D[real & ~is_copy], rtol=1e-5, atol=0)
    assert (real & ~is_copy).any()
    assert not slope[~real].any()


def test_gdes_sends_no_discriminator_gradient_into_the_generators_tables(ids: torch.Tensor) -> None:
    for sharing, reaches in (("gdes", False), ("embeddings", True)):
        module = build({"sharing": sharing}, mlm_weight=0.0)
        run(module, ids)
        towers = module.towers
        tables = [towers.embeddings.word, towers.embeddings.position, towers.embeddings.token_type]
        assert all(bool(t.weight.grad is not None and t.weight.grad.any()) == reaches for t in tables)
        if sharing == "gdes":
            assert towers.discriminator_embeddings.word.weight.grad.any()
            assert towers.discriminator_embeddings.layer_norm.weight.grad.any()


def test_a_fresh_difference_reads_the_generators_tables(ids: torch.Tensor) -> None:
    towers = build_objective(model_of(sharing="gdes"), ObjectiveConfig(), SPECIAL, 3).towers
    layout = derive(ids, SPECIAL)
    torch.testing.assert_close(towers.embed_discriminator(ids, layout), towers.embed(ids, layout))


def test_electrics_noise_model_has_no_gradient_from_the_discriminator(ids: torch.Tensor) -> None:
    module = build({"sharing": "none"}, name="electric", mlm_weight=0.0)
    run(module, ids)
    parts = (module.towers.generator, module.towers.generator_reverse, module.towers.generator_head)
    assert not any(p.grad is not None and p.grad.any() for part in parts for p in part.parameters())
    assert module.towers.discriminator_head.out.weight.grad.any()


def test_electrics_towers_do_not_see_the_token_that_they_predict(ids: torch.Tensor) -> None:
    """A change of token t moves the cloze states of its example, but never its own, nor those of other examples."""
    module = build(name="electric")
    batch = module.batch(given(ids))
    before = module._cloze_states(batch)
    for t in (1, 7, 30):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] - 5 + 17) % 290 + 5
        after = module._cloze_states(dataclasses.replace(module.batch(given(changed)), layout=batch.layout))
        moved = (after - before).abs().amax(-1) > 1e-9
        same = batch.layout.example_BS == batch.layout.example_BS[:, t : t + 1]
        others = same.clone()
        others[:, t] = False
        assert not moved[:, t].any()
        assert not moved[~same].any()
        assert moved[others].all()


def test_the_adversarial_gradient_is_reinforces(ids: torch.Tensor) -> None:
    """(reward - baseline) * grad log p(sample) per slot, written out with full softmaxes and plain autograd."""
    module = build({"sharing": "none"}, name="adversarial", temperature=1.5, rtd_weight=0.0).double()
    out = run(module, ids)
    towers = module.towers
    found = {name: p.grad.clone() for name, p in towers.named_parameters() if p.grad is not None}
    assert not any(g.any() for name, g in found.items() if name.startswith("discriminator"))

    batch = module.batch(given(ids))
    masking = module.mask(batch)
    states = module.generator_states(batch, masking)
    sampled = module.fill(batch, masking, states.detach()).sampled_M.view(masking.position_BN.shape)
    logits = (
        towers.generator_head.transform(states) @ towers.embeddings.word.weight[:300].T + towers.generator_head.bias
    )
    log_prob = (logits / 1.5).log_softmax(-1).view(*sampled.shape, -1).gather(-1, sampled[..., None])[..., 0]
    label = out.label_BS.gather(1, masking.position_BN)
    p_replaced = out.rtd_logit_BS.double().gather(1, masking.position_BN).sigmoid()
    right = torch.where(label, p_replaced, 1 - p_replaced)
    guess = towers.baseline(states.detach()).view(sampled.shape).sigmoid()
    policy = (-right.log() + guess.log()).detach() * log_prob  # reward - baseline, baseline = -log guess
    entropy = -(right * guess.log() + (1 - right) * (1 - guess).log())
    module.zero_grad()
    (0.01 * ((entropy - policy) * masking.weight_BN).sum()).backward()
    for name, parameter in towers.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-9, msg=name)
    assert found["baseline.weight"].any()
    assert found["generator.layers.0.expand.weight"].any()


def test_a_reinforced_generator_turns_to_samples_that_fool(ids: torch.Tensor) -> None:
    """Against a fixed discriminator the mean reward rises."""
    module = build({"sharing": "none"}, name="adversarial", rtd_weight=0.0, mlm_weight=1.0)
    with torch.no_grad():
        module.towers.discriminator_head.out.weight.mul_(20.0)  # a discriminator with opinions
    mine = [p for n, p in module.towers.named_parameters() if not n.startswith("discriminator")]
    optimizer, rewards = torch.optim.Adam(mine, lr=5e-3), []
    for step in range(40):
        out = run(module, ids, step)
        optimizer.step()
        masked = mask_rows(ids, SPECIAL, module.objective, SEED, step, torch.arange(len(ids)))
        right = torch.where(out.label_BS, out.rtd_logit_BS, -out.rtd_logit_BS).gather(1, masked.position_BN)
        rewards.append((-torch.nn.functional.logsigmoid(right) * masked.weight_BN).sum() / masked.weight_BN.sum())
    assert torch.stack(rewards[-10:]).mean() > torch.stack(rewards[:10]).mean()


@pytest.mark.parametrize("disallow", [False, True])
def test_a_fixed_generator_draws_its_weights(disallow: bool) -> None:
    weight = np.array([0, 1, 0, 5, 2, 0, 8, 0], float)
    target = torch.full((4000, 16), 3)
    drawn = FixedGenerator(weight, disallow)(target, torch.arange(4000), STEP, SEED)
    if disallow:
        weight[3] = 0
    share = torch.bincount(drawn.flatten(), minlength=8).double() / drawn.numel()
    np.testing.assert_allclose(share, weight / weight.sum(), atol=4 * 0.5 / drawn.numel() ** 0.5)
    assert not share[weight == 0].any()
    again = FixedGenerator(np.array([0, 1, 0, 5, 2, 0, 8, 0], float), disallow)(
        target[7:9], torch.tensor([7, 8]), STEP, SEED
    )
    assert torch.equal(again, drawn[7:9])
    assert not torch.equal(drawn[7], drawn[8])


def test_no_word_falls_outside_the_vocabulary() -> None:
    """The first and the last word of the range, for weights whose shares round."""
    generator = FixedGenerator(np.array([0.0, 1.0, 1e-30, 3.0, 0.0]), False)
    assert torch.searchsorted(generator.ends_V, torch.tensor([0, 2**32 - 1]), right=True).tolist() == [1, 3]
    assert FixedGenerator(uniform_weights(7), False).ends_V[-1] == 2**32


def test_unigram_weights_follow_counts_temperature_and_specials() -> None:
    counts = np.array([900, 50, 10, 10, 0, 4, 16])
    weight = unigram_weights(counts, (0, 2, 3), temperature=2.0)
    np.testing.assert_allclose(weight, [0, 50**0.5, 0, 0, 0, 2, 4])


@pytest.mark.parametrize("rows", [1, 7, CHUNK_ROWS + 3])
def test_token_log_probs_and_gradients_equal_a_full_softmax(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, table = torch.randn(rows, 8, generator=generator), torch.randn(32, 8, generator=generator)
    bias, target = torch.randn(29, generator=generator), torch.randint(29, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, table, bias)]
        if dtype == torch.float32:
            log_prob, best = token_log_probs(*leaves, target, 29)
        else:
            full = (leaves[0] @ leaves[1][:29].T + leaves[2]).log_softmax(-1)
            log_prob, best = full.gather(1, target[:, None])[:, 0], full.argmax(1)
        (log_prob * upstream.to(dtype)).sum().backward()
        results.append((log_prob.detach(), best, [leaf.grad for leaf in leaves]))
    (ours, ours_best, ours_grads), (true, true_best, true_grads) = results
    torch.testing.assert_close(ours.double(), true, rtol=0, atol=2e-5)
    assert torch.equal(ours_best, true_best)
    for mine, theirs in zip(ours_grads, true_grads):
        scale = theirs.abs().max()
        torch.testing.assert_close(mine.double() / scale, theirs / scale, rtol=0, atol=1e-5)
    assert not ours_grads[1][29:].any()


@pytest.mark.parametrize(
    ("model", "objective", "said"),
    [
        ({}, {"generator_only_steps": 5}, "they must be of one size"),
        ({"generator": TOWER}, {"generator_only_steps": 5}, "model.sharing is embeddings"),
        ({"sharing": "none"}, {"name": "mlm"}, "has one tower only"),
        ({"sharing": "gdes"}, {"generator": "uniform"}, "has one tower only"),
        ({"sharing": "all", "generator": TOWER}, {"name": "electric"}, "two causal towers"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused_in_one_line(model: Any, objective: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        check_objective(model_of(**model), ObjectiveConfig(**objective))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        (ObjectiveConfig, {"name": "mlm", "generator": "uniform"}),
        (ObjectiveConfig, {"name": "rtd_masked_only", "generator_only_steps": 5}),
        (ObjectiveConfig, {"name": "adversarial", "disallow_correct": True}),
        (ObjectiveConfig, {"name": "bert"}),
        (model_of, {"sharing": "all"}),
        (model_of, {"generator_embedding_size": 16}),
    ],
)
def test_options_that_exclude_each_other_are_refused(section: Any, fields: Any) -> None:
    with pytest.raises(ValidationError):
        section(**fields)
