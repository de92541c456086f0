"""One training step against Hugging Face's modules: masks, samples, labels, both losses and every gradient."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from electra_dist.model.row_layout import derive
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.masking import num_masked
from electra_dist.pretrained.hf_conversion import (
    export_discriminator,
    export_generator,
    from_hf_discriminator,
    from_hf_generator,
)

SAMPLE = 5
SEED, STEP = 99, 1234


def inserted_ids(positions: np.ndarray, weights: np.ndarray, sampled: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The corrupted rows, slot by slot; several samples of one position give the floor of their mean."""
    corrupted = ids.copy()
    for b in range(len(ids)):
        for position in set(positions[b][weights[b] > 0].tolist()):
            samples = sampled[b][(positions[b] == position) & (weights[b] > 0)]
            corrupted[b, position] = samples.sum() // len(samples)
    return corrupted


@pytest.mark.parametrize("masking", ["without_replacement", "reference"])
def test_step_equals_hugging_face(
    masking: Any,
    tmp_path: Path,
    make_model: Callable[..., Any],
    make_ids: Callable[..., torch.Tensor],
    mirror_masks: Callable[..., Any],
    bits: Callable[..., np.ndarray],
    special: Any,
) -> None:
    objective, model = make_model(masking=masking, mask_prob=0.25)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
    ids, rows = make_ids([64, 47, 20, 60], seq_len=64), [40, 41, 42, 43]
    count, tokens = int(num_masked(ids, special, objective.objective).sum()), int((ids != 0).sum())
    ours = objective(StepInput(ids, torch.tensor(rows), STEP, SEED, 1 / count, 1 / tokens))
    ours.loss.backward()

    vocab = tmp_path / "vocab.txt"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(model.vocab_size - 5)]
    vocab.write_text("\n".join(names) + "\n")
    twins = []
    for export, load in ((export_generator, ElectraForMaskedLM), (export_discriminator, ElectraForPreTraining)):
        export(objective.state_dict(), model, special, vocab, True, tmp_path / load.__name__)
        twins.append(load.from_pretrained(tmp_path / load.__name__, attn_implementation="eager").eval())
    generator, discriminator = twins
    layout = derive(ids, special)
    together = layout.example_BS[:, None, :, None] == layout.example_BS[:, None, None, :]
    inputs = {
        "token_type_ids": layout.token_type_BS,
        "position_ids": layout.position_BS,
        "attention_mask": torch.where(together, 0.0, -1e30),
    }

    positions, weights, masked = mirror_masks(ids.numpy(), objective.objective, SEED, STEP, rows)
    slots = positions.shape[1]
    logits = generator(input_ids=torch.from_numpy(masked), **inputs).logits
    at = torch.from_numpy(positions)
    slot_logits = logits.gather(1, at[..., None].expand(-1, -1, model.vocab_size))
    target, weight = ids.gather(1, at), torch.from_numpy(weights)
    mlm_sum = (F.cross_entropy(slot_logits.flatten(0, 1), target.flatten(), reduction="none") * weight.flatten()).sum()

    draws = functools.partial(bits, step=STEP, purpose=SAMPLE, seed=SEED, count=model.vocab_size)
    noise_bits = np.stack([[draws(row=row * slots + j) for j in range(slots)] for row in rows]).astype(np.float64)
    gumbel = -np.log(-np.log1p(-(noise_bits + 0.5) / 2**32))
    sampled = (slot_logits.detach().double().numpy() + gumbel).argmax(-1)
    corrupted = inserted_ids(positions, weights, sampled, ids.numpy())
    label, real = torch.from_numpy(corrupted) != ids, ids != special.pad

    rtd_logits = discriminator(input_ids=torch.from_numpy(corrupted), **inputs).logits
    rtd_sum = F.binary_cross_entropy_with_logits(rtd_logits[real], label[real].float(), reduction="sum")
    loss = mlm_sum / count + 50.0 * rtd_sum / tokens
    loss.backward()

    assert torch.equal(ours.label_BS, label)
    assert (ours.rtd_logit_BS - rtd_logits)[real].abs().max() <= 1e-5
    sums = Sums(*ours.sums.tolist())
    called = rtd_logits > 0
    assert sums.mlm_loss_sum == pytest.approx(mlm_sum.item(), rel=1e-6)
    assert sums.rtd_loss_sum == pytest.approx(rtd_sum.item(), rel=1e-6)
    assert ours.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (sums.mlm_weight, sums.tokens) == (count, tokens)
    assert sums.mlm_correct == ((slot_logits.argmax(-1) == target) * weight).sum()
    assert sums.sampled_correct == ((sampled == target.numpy()) * weights).sum()
    assert (sums.replaced, sums.original) == (label.sum(), (real & ~label).sum())
    assert sums.replaced_correct == (label & called).sum()
    assert sums.original_correct == (real & ~label & ~called).sum()

    theirs = from_hf_generator({n: p.grad for n, p in generator.named_parameters()}, model)
    kept = from_hf_discriminator({n: p.grad for n, p in discriminator.named_parameters()}, model)
    for name, gradient in kept.items():
        theirs[name] = theirs[name] + gradient if name in theirs else gradient
    for name, parameter in objective.towers.named_parameters():
        scale = theirs[name].abs().max().clamp(min=1e-3)
        assert (parameter.grad - theirs[name]).abs().max() <= 2e-5 * scale, name
    assert masking == "without_replacement" or len(np.unique(positions[0])) < slots  # duplicates were met


def test_row_gives_the_same_numbers_in_any_batch(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    objective, _ = make_model()
    ids, rows = make_ids([64, 50, 33, 64], seq_len=64), torch.arange(4) + 70
    whole = objective(StepInput(ids, rows, STEP, SEED, 0.01, 0.01))
    parts = [objective(StepInput(ids[p], rows[p], STEP, SEED, 0.01, 0.01)) for p in (slice(0, 3), slice(3, 4))]
    assert torch.equal(torch.cat([part.label_BS for part in parts]), whole.label_BS)
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(sum(part.sums for part in parts), whole.sums, rtol=1e-6, atol=0)


def test_pads_and_empty_slots_change_nothing(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    """A row of padding only, beside others: finite, and no count, loss or gradient differs."""
    objective, _ = make_model()
    ids, rows = make_ids([64, 0], seq_len=64), torch.arange(2)
    outputs = []
    for batch in (slice(0, 1), slice(0, 2)):
        objective.zero_grad()
        out = objective(StepInput(ids[batch], rows[batch], STEP, SEED, 0.01, 0.01))
        out.loss.backward()
        outputs.append((out.loss.item(), out.sums, [p.grad.clone() for p in objective.parameters()]))
    assert outputs[1][0] == pytest.approx(outputs[0][0], rel=1e-6)
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-6, atol=0)
    for alone, padded in zip(outputs[0][2], outputs[1][2], strict=True):
        torch.testing.assert_close(alone, padded, rtol=1e-4, atol=1e-7)


def test_pad_rows_of_the_table_never_train_and_are_never_sampled(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    objective, model = make_model()
    table = objective.towers.embeddings.word.weight
    with torch.no_grad():
        table[model.vocab_size :] = 50.0  # would win every softmax
    ids = make_ids([64] * 4, seq_len=64)
    out = objective(StepInput(ids, torch.arange(4), STEP, SEED, 0.01, 0.01))
    out.loss.backward()
    assert not table.grad[model.vocab_size :].any()
    assert Sums(*out.sums.tolist()).mlm_loss_sum / 64 < 2 * np.log(model.vocab_size)


def test_samples_carry_no_gradient(make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]) -> None:
    objective, _ = make_model(mlm_weight=0.0)
    ids = make_ids([64] * 2, 64)
    objective(StepInput(ids, torch.arange(2), STEP, SEED, 0.01, 0.01)).loss.backward()
    assert not any(p.grad.any() for p in objective.towers.generator.parameters())
    assert objective.towers.discriminator.layers[0].expand.weight.grad.any()


@pytest.mark.parametrize("how", ["cast", "autocast"])
def test_bf16_sums_are_fp32(how: str, make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]) -> None:
    """In bf16 the loss moves by the rounding of features, not by that of sums."""
    objective, _ = make_model()
    ids, rows = make_ids([64] * 16, seq_len=64), torch.arange(16)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.copy_(parameter.bfloat16())
    exact = objective(StepInput(ids, rows, STEP, SEED, 1.0, 1.0))
    if how == "cast":
        out = objective.bfloat16()(StepInput(ids, rows, STEP, SEED, 1.0, 1.0))
    else:
        with torch.autocast("cpu", torch.bfloat16):
            out = objective(StepInput(ids, rows, STEP, SEED, 1.0, 1.0))
    assert out.loss.dtype == torch.float32
    assert out.rtd_logit_BS.dtype == torch.float32
    exact_sums, sums = Sums(*exact.sums.tolist()), Sums(*out.sums.tolist())
    assert sums.mlm_loss_sum == pytest.approx(exact_sums.mlm_loss_sum, rel=2e-3)
    assert (sums.tokens, sums.mlm_weight) == (exact_sums.tokens, exact_sums.mlm_weight)
    assert sums.rtd_loss_sum == pytest.approx(exact_sums.rtd_loss_sum, rel=2e-2)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in objective.parameters())


@pytest.mark.parametrize("masking", ["without_replacement", "reference"])
def test_nothing_waits_for_the_device(masking: Any, make_model: Callable[..., Any]) -> None:
    """On the meta device there are no values: any `.item()`, boolean index or data-dependent shape raises."""
    objective, _ = make_model(masking=masking)
    objective.backend = "reference"
    objective.to("meta")
    ids, rows = torch.zeros(4, 64, dtype=torch.int64, device="meta"), torch.arange(4, device="meta")
    num_masked(ids, objective.special, objective.objective)
    out = objective(StepInput(ids, rows, STEP, SEED, 0.01, 0.01))
    out.loss.backward()
    assert out.sums.shape == (len(Sums._fields),)
    assert out.label_BS.shape == ids.shape


def test_dropout_repeats_with_the_seed_and_is_off_in_evaluation(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    objective, _ = make_model(dropout=0.1)
    ids, rows = make_ids([64] * 2, seq_len=64), torch.arange(2)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return objective(StepInput(ids, rows, STEP, SEED, 0.01, 0.01)).loss.item()

    assert loss(1) == loss(1) != loss(2)
    objective.eval()
    assert loss(1) == loss(2)
