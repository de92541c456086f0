"""Properties that define each objective: where gradients flow, what is frozen or drawn, which options are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from electra_kernels.operation_types import SpecialIds
from support.float64_truth import shaken

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.attention import derive
from electra_dist.model.heads import CHUNK_ROWS, token_log_probs
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import FixedGenerator, unigram_weights
from electra_dist.objectives.masking import Masking, mask_rows

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FIRST_TEXT_ID = 5  # ids below are special tokens
VOCAB_SIZE = 300
SEED = 5
STEP = 77
LOSS_SCALE = 0.01  # factor of both loss sums in every step below
LARGE_TOWER = TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
SMALL_TOWER = TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32)


def small_model_config(**fields: Any) -> ModelConfig:
    """A model of two small towers without dropout; `fields` override the defaults."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "embedding_size": 24,
        "max_positions": 64,
        "discriminator": LARGE_TOWER,
        "generator": SMALL_TOWER,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return ModelConfig(**{**defaults, **fields})


def noisy_objective(model_fields: dict[str, Any] | None = None, **objective_fields: Any) -> Any:
    """An objective over small towers, with noise on every parameter so that none is at its default."""
    model = small_model_config(**(model_fields or {}))
    module = build_objective(model, ObjectiveConfig(**objective_fields), SPECIAL, 3)
    return shaken(module)


@pytest.fixture
def ids(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Three rows of 48 ids; the last two end with padding."""
    return make_ids([48, 40, 33], seq_len=48)


def step_input(ids: torch.Tensor, step: int = STEP) -> StepInput:
    """The input of one step over `ids`, whose rows are numbered from 0."""
    return StepInput(ids, torch.arange(len(ids)), step, SEED, LOSS_SCALE, LOSS_SCALE)


def masking_of(module: Any, ids: torch.Tensor, step: int = STEP) -> Masking:
    """The masking that `module` applies to `ids` in `step`."""
    return mask_rows(ids, SPECIAL, module.objective, SEED, step, torch.arange(len(ids)))


def times_masked(ids: torch.Tensor, masking: Masking) -> torch.Tensor:
    """How many slots masked each position, [B, S] float32."""
    return torch.zeros(ids.shape).scatter_add(1, masking.position_BN, masking.weight_BN)


def run_step(module: Any, ids: torch.Tensor, step: int = STEP) -> Any:
    """Run forward and backward with cleared gradients; return the output of the forward pass."""
    module.zero_grad()
    out = module(step_input(ids, step))
    if out.loss.requires_grad:
        out.loss.backward()
    return out


def state_gradient_sizes(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, S]: sum of absolute values of the loss's gradient with respect to the discriminator's last states."""
    recorded_states: list[torch.Tensor] = []

    def record(_module: Any, _inputs: Any, states: torch.Tensor) -> None:
        states.retain_grad()
        recorded_states.append(states)

    handle = module.towers.discriminator.register_forward_hook(record)
    run_step(module, ids)
    handle.remove()
    last_states = recorded_states[-1]
    return last_states.grad.abs().sum(-1)


def logit_of_true_label(out: Any) -> torch.Tensor:
    """[B, S]: the logit of the true answer to "was this token replaced?"; its softplus(-x) is the loss."""
    return torch.where(out.label_BS, out.rtd_logit_BS, -out.rtd_logit_BS)


@pytest.mark.parametrize("name", ["rtd_masked_only", "replace_mlm", "mlm"])
@pytest.mark.parametrize("masking", ["without_replacement", "reference"])
def test_objectives_over_masked_tokens_get_gradients_at_masked_positions_only(
    name: Any, masking: Any, ids: torch.Tensor
) -> None:
    module = noisy_objective(name=name, masking=masking)

    gradient_size = state_gradient_sizes(module, ids)

    is_masked = times_masked(ids, masking_of(module, ids)) > 0
    assert (gradient_size[is_masked] > 0).all()
    assert not gradient_size[~is_masked].any()


@pytest.mark.parametrize("name", ["rtd", "all_tokens_mlm", "electric", "adversarial"])
def test_objectives_over_all_tokens_get_a_gradient_at_every_real_token_and_none_at_padding(
    name: Any, ids: torch.Tensor
) -> None:
    module = noisy_objective(name=name)

    gradient_size = state_gradient_sizes(module, ids)

    is_real = ids != SPECIAL.pad
    assert (gradient_size[is_real] > 0).all()
    assert not gradient_size[~is_real].any()


def test_rtd_masked_only_counts_the_loss_of_a_position_once_per_draw(ids: torch.Tensor) -> None:
    """The reference draws positions with replacement, and ELECTRA 15% weighs a position drawn twice double."""
    module = noisy_objective(name="rtd_masked_only", masking="reference", mask_prob=0.5)

    out = run_step(module, ids)

    draws = times_masked(ids, masking_of(module, ids))
    assert draws.max() >= 2
    loss_BS = F.softplus(-logit_of_true_label(out).double())
    expected_loss_sum = (loss_BS * draws).sum().item()
    assert Sums(*out.sums.tolist()).rtd_loss_sum == pytest.approx(expected_loss_sum, rel=1e-6)


def test_copy_gate_gradient_favours_copying_exactly_where_the_input_token_is_correct(ids: torch.Tensor) -> None:
    """With D = sigmoid(z) of the gate logit z, p the mixture's and softmax the head's probability of the true token:
    dL/dz of a copied token is (D(1-D)/p)(softmax - 1) <= 0, and dL/dz of a replaced token is D > 0.
    """
    module = noisy_objective(name="all_tokens_mlm", mlm_weight=0.0)
    gate_logits: list[torch.Tensor] = []
    embedded_ids: list[torch.Tensor] = []

    def record_gate(_module: Any, _inputs: Any, gate_logit: torch.Tensor) -> None:
        gate_logit.retain_grad()
        gate_logits.append(gate_logit)

    def record_ids(_module: Any, inputs: Any, _output: Any) -> None:
        embedded_ids.append(inputs[0])

    module.towers.copy_gate.register_forward_hook(record_gate)
    module.towers.embeddings.word.register_forward_hook(record_ids)

    run_step(module, ids)

    corrupted_ids = embedded_ids[-1]  # the discriminator is the last to embed
    gate_logit = gate_logits[0]
    slope = gate_logit.grad.view(ids.shape) / LOSS_SCALE
    gate = gate_logit.detach().view(ids.shape).sigmoid()
    is_real = ids != SPECIAL.pad
    is_copied = is_real & (corrupted_ids == ids)
    is_replaced = is_real & (corrupted_ids != ids)
    assert is_replaced.any()
    assert (slope[is_copied] < 0).all()
    torch.testing.assert_close(slope[is_replaced], gate[is_replaced], rtol=1e-5, atol=0)
    assert not slope[~is_real].any()


def test_gdes_sends_no_discriminator_gradient_into_the_generators_tables(ids: torch.Tensor) -> None:
    """Plainly shared embeddings, the control, do get one; the generator itself has no loss in both cases."""
    for sharing, is_reached in (("gdes", False), ("embeddings", True)):
        module = noisy_objective({"sharing": sharing}, mlm_weight=0.0)

        run_step(module, ids)

        towers = module.towers
        for table in (towers.embeddings.word, towers.embeddings.position, towers.embeddings.token_type):
            gradient = table.weight.grad
            has_gradient = gradient is not None and bool(gradient.any())
            assert has_gradient == is_reached
        if sharing == "gdes":
            assert towers.discriminator_embeddings.word.weight.grad.any()
            assert towers.discriminator_embeddings.layer_norm.weight.grad.any()


def test_under_gdes_a_new_discriminator_embeds_like_the_generator(ids: torch.Tensor) -> None:
    """The discriminator's own tables are differences from the generator's, and they start at zero."""
    model = small_model_config(sharing="gdes")
    towers = build_objective(model, ObjectiveConfig(), SPECIAL, 3).towers
    layout = derive(ids, SPECIAL)

    torch.testing.assert_close(towers.discriminator_embeddings(ids, layout), towers.embeddings(ids, layout))


def test_electrics_discriminator_loss_has_no_gradient_in_the_noise_model(ids: torch.Tensor) -> None:
    module = noisy_objective({"sharing": "none"}, name="electric", mlm_weight=0.0)

    run_step(module, ids)

    towers = module.towers
    for part in (towers.generator, towers.generator_reverse, towers.generator_head):
        for parameter in part.parameters():
            assert parameter.grad is None or not parameter.grad.any()
    assert towers.discriminator_head.out.weight.grad.any()


def test_electric_labels_every_noised_token_also_where_the_sample_is_the_original_token(ids: torch.Tensor) -> None:
    """The label is "this position holds a sample of the noise model", not "this token differs from the original": only
    then is the discriminator's logit the log ratio of text and noise. Here every sample is the original token.
    """
    only_token = 7
    ids = torch.where((ids != SPECIAL.pad) & (ids >= FIRST_TEXT_ID), only_token, ids)
    module = noisy_objective(name="electric")
    with torch.no_grad():
        module.towers.generator_head.bias[only_token] = 1000.0

    out = run_step(module, ids)

    masked_text = (times_masked(ids, masking_of(module, ids)) > 0) & (ids == only_token)
    is_text = ids == only_token
    assert masked_text.any()
    assert torch.equal(out.label_BS[is_text], masked_text[is_text])
    sums = Sums(*out.sums.tolist())
    assert sums.replaced == (times_masked(ids, masking_of(module, ids)) > 0).sum()


def test_electrics_prediction_of_a_token_sees_all_of_its_example_except_the_token(ids: torch.Tensor) -> None:
    """A changed token moves the cloze states of the rest of its example, not its own or those of other examples."""
    module = noisy_objective(name="electric")
    batch = module.batch(step_input(ids))
    states = module._cloze_states(batch)
    example_BS = batch.layout.example_BS

    for position in (1, 7, 30):
        changed_ids = ids.clone()
        # Rotate the 290 ids from FIRST_TEXT_ID by 17: another text token. The layout stays that of the original rows.
        changed_ids[:, position] = (changed_ids[:, position] - FIRST_TEXT_ID + 17) % 290 + FIRST_TEXT_ID
        changed_batch = dataclasses.replace(module.batch(step_input(changed_ids)), layout=batch.layout)
        changed_states = module._cloze_states(changed_batch)

        has_moved = (changed_states - states).abs().amax(-1) > 1e-9
        is_same_example = example_BS == example_BS[:, position : position + 1]
        is_rest_of_example = is_same_example.clone()
        is_rest_of_example[:, position] = False
        assert not has_moved[:, position].any()
        assert not has_moved[~is_same_example].any()
        assert has_moved[is_rest_of_example].all()


def inserted_tokens(position_BN: torch.Tensor, weight_BN: torch.Tensor, sampled_BN: torch.Tensor) -> torch.Tensor:
    """The token that each slot's position holds after corruption: the floor of the mean of its slots' samples."""
    inserted_BN = sampled_BN.clone()
    for b, (positions, weights) in enumerate(zip(position_BN.tolist(), weight_BN.tolist(), strict=True)):
        for n, position in enumerate(positions):
            samples = [
                int(sampled_BN[b, other])
                for other in range(len(positions))
                if positions[other] == position and weights[other] > 0
            ]
            if weights[n] > 0:
                inserted_BN[b, n] = sum(samples) // len(samples)
    return inserted_BN


@pytest.mark.parametrize("masking_mode", ["without_replacement", "reference"])
def test_adversarial_gradient_is_that_of_reinforce_with_a_baseline(masking_mode: Any, ids: torch.Tensor) -> None:
    """The policy gradient is (reward - baseline) * grad log p(inserted token) per slot, and the baseline learns the
    reward by cross entropy. The expected gradient comes from full softmaxes and plain autograd. The reference draws
    positions more than once; the token that was inserted there, which the discriminator judges, is then no sample.
    """
    temperature = 1.5
    module = noisy_objective(
        {"sharing": "none"},
        name="adversarial",
        temperature=temperature,
        rtd_weight=0.0,
        masking=masking_mode,
        mask_prob=0.4,
    ).double()
    towers = module.towers

    out = run_step(module, ids)
    gradients = {name: p.grad.clone() for name, p in towers.named_parameters() if p.grad is not None}

    batch = module.batch(step_input(ids))
    masking = module.mask(batch)
    states = module.generator_states(batch, masking)
    original = batch.ids_BS.gather(1, masking.position_BN)
    sampled = module.predict(batch, states.detach(), original, masking.weight_BN).sampled_M.view(original.shape)
    table = towers.embeddings.word.weight[:VOCAB_SIZE]
    logits = towers.generator_head.transform(states) @ table.T + towers.generator_head.bias
    log_probs = (logits / temperature).log_softmax(-1).view(*sampled.shape, -1)
    inserted = inserted_tokens(masking.position_BN, masking.weight_BN, sampled)
    has_other_token_than_its_sample = bool(((inserted != sampled) & (masking.weight_BN > 0)).any())
    assert has_other_token_than_its_sample == (masking_mode == "reference")
    log_prob_of_inserted = log_probs.gather(-1, inserted[..., None])[..., 0]

    was_replaced = out.label_BS.gather(1, masking.position_BN)
    p_replaced = out.rtd_logit_BS.double().gather(1, masking.position_BN).sigmoid()
    p_right = torch.where(was_replaced, p_replaced, 1 - p_replaced)  # the discriminator's, of the true label
    p_right_guess = towers.baseline(states.detach()).view(sampled.shape).sigmoid()
    reward = -p_right.log()
    baseline = -p_right_guess.log()
    policy_gain = (reward - baseline).detach() * log_prob_of_inserted
    baseline_loss = -(p_right * p_right_guess.log() + (1 - p_right) * (1 - p_right_guess).log())
    expected_loss = LOSS_SCALE * ((baseline_loss - policy_gain) * masking.weight_BN).sum()
    module.zero_grad()
    expected_loss.backward()

    for name, gradient in gradients.items():
        if name.startswith("discriminator"):
            assert not gradient.any()
    for name, parameter in towers.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-9, msg=name)
    assert gradients["baseline.weight"].any()
    assert gradients["generator.layers.0.expand.weight"].any()


def test_adversarial_generator_earns_a_higher_reward_against_a_fixed_discriminator(ids: torch.Tensor) -> None:
    """The reward of a sample is the discriminator's loss on it."""
    module = noisy_objective({"sharing": "none"}, name="adversarial", rtd_weight=0.0, mlm_weight=1.0)
    with torch.no_grad():
        module.towers.discriminator_head.out.weight.mul_(20.0)  # confident answers, so that rewards differ
    generator_parameters = [p for n, p in module.towers.named_parameters() if not n.startswith("discriminator")]
    optimizer = torch.optim.Adam(generator_parameters, lr=5e-3)

    mean_rewards = []
    for step in range(40):
        out = run_step(module, ids, step)
        optimizer.step()
        masking = masking_of(module, ids, step)
        logit_BN = logit_of_true_label(out).gather(1, masking.position_BN)
        reward_BN = -F.logsigmoid(logit_BN)
        mean_rewards.append((reward_BN * masking.weight_BN).sum() / masking.weight_BN.sum())

    first_steps = torch.stack(mean_rewards[:10])
    last_steps = torch.stack(mean_rewards[-10:])
    assert last_steps.mean() > first_steps.mean()


@pytest.mark.parametrize("disallow_correct", [False, True])
def test_fixed_generator_draws_tokens_in_proportion_to_their_weights(disallow_correct: bool) -> None:
    """With `disallow_correct` the true token has share 0. A row's draws do not depend on the other rows."""
    weights = np.array([0, 1, 0, 5, 2, 0, 8, 0], float)
    true_token = 3
    target = torch.full((4000, 16), true_token)

    drawn = FixedGenerator(weights.copy(), disallow_correct)(target, torch.arange(4000), STEP, SEED)
    drawn_of_two_rows = FixedGenerator(weights.copy(), disallow_correct)(target[7:9], torch.tensor([7, 8]), STEP, SEED)

    expected_weights = weights.copy()
    if disallow_correct:
        expected_weights[true_token] = 0
    expected_share = expected_weights / expected_weights.sum()
    share = torch.bincount(drawn.flatten(), minlength=len(weights)).double() / drawn.numel()
    four_deviations = 4 * 0.5 / drawn.numel() ** 0.5  # a share's deviation is at most 0.5 / sqrt(n)
    np.testing.assert_allclose(share, expected_share, atol=four_deviations)
    assert not share[expected_weights == 0].any()
    assert torch.equal(drawn_of_two_rows, drawn[7:9])
    assert not torch.equal(drawn[7], drawn[8])


def test_fixed_generator_maps_the_lowest_and_the_highest_random_word_to_tokens_of_positive_weight() -> None:
    """The shares of these weights round; still every 32-bit word falls to a token of the vocabulary."""
    lowest_and_highest_word = torch.tensor([0, 2**32 - 1])
    generator = FixedGenerator(np.array([0.0, 1.0, 1e-30, 3.0, 0.0]), False)

    tokens = torch.searchsorted(generator.ends_V, lowest_and_highest_word, right=True)

    assert tokens.tolist() == [1, 3]
    assert FixedGenerator(np.ones(7), False).ends_V[-1] == 2**32


def test_unigram_weights_are_tempered_counts_and_zero_for_special_tokens() -> None:
    counts = np.array([900, 50, 10, 10, 0, 4, 16])
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=6)

    weights = unigram_weights(counts, special, temperature=2.0)

    np.testing.assert_allclose(weights, [0, 50**0.5, 0, 0, 0, 2, 0])  # count ** (1 / temperature)


@pytest.mark.parametrize("rows", [1, 7, CHUNK_ROWS + 3])
def test_token_log_probs_and_their_gradients_equal_a_full_softmax_in_float64(rows: int) -> None:
    vocab_size = 29
    padded_size = 32
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 8, generator=generator)
    table = torch.randn(padded_size, 8, generator=generator)
    bias = torch.randn(vocab_size, generator=generator)
    target = torch.randint(vocab_size, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)

    leaves = [t.clone().requires_grad_() for t in (x, table, bias)]
    log_prob, best = token_log_probs(*leaves, target, vocab_size)
    (log_prob * upstream).sum().backward()

    exact_leaves = [t.double().requires_grad_() for t in (x, table, bias)]
    exact_x, exact_table, exact_bias = exact_leaves
    exact_log_probs = (exact_x @ exact_table[:vocab_size].T + exact_bias).log_softmax(-1)
    exact_log_prob = exact_log_probs.gather(1, target[:, None])[:, 0]
    (exact_log_prob * upstream.double()).sum().backward()

    torch.testing.assert_close(log_prob.detach().double(), exact_log_prob.detach(), rtol=0, atol=2e-5)
    assert torch.equal(best, exact_log_probs.argmax(1))
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        scale = exact_leaf.grad.abs().max()
        torch.testing.assert_close(leaf.grad.double() / scale, exact_leaf.grad / scale, rtol=0, atol=1e-5)
    table_gradient = leaves[1].grad
    assert not table_gradient[vocab_size:].any()
