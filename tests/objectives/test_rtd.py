"""One training step against Hugging Face's modules: masks, samples, labels, both losses and every gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from electra_dist.model.attention import derive
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.masking import num_masked
from electra_dist.pretrained.export import export_tower
from electra_dist.pretrained.hf import from_hf
from electra_dist.tokenizer import Vocabulary

PURPOSE_SAMPLE = 5  # the word of a random number's key that stands for sampling
SEED = 99
STEP = 1234
SCALES = (0.01, 0.01)  # factors of both loss sums where their values do not matter
RTD_WEIGHT = 50.0  # the paper's lambda, the default of `objective.rtd_weight`


class Twins(NamedTuple):
    """Hugging Face's two models with the weights of an objective."""

    generator: ElectraForMaskedLM
    discriminator: ElectraForPreTraining


def exported_twins(module: Any, model: Any, special: Any, folder: Path) -> Twins:
    """Hugging Face's models, loaded from an export of `module`."""
    words = [f"w{i}" for i in range(model.vocab_size - 5)]
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    generator_folder = folder / "generator"
    discriminator_folder = folder / "discriminator"
    export_tower(module.state_dict(), model, "generator", Vocabulary.read(vocab), True, generator_folder)
    export_tower(module.state_dict(), model, "discriminator", Vocabulary.read(vocab), True, discriminator_folder)
    return Twins(
        ElectraForMaskedLM.from_pretrained(generator_folder, attn_implementation="eager").eval(),
        ElectraForPreTraining.from_pretrained(discriminator_folder, attn_implementation="eager").eval(),
    )


def twin_gradients(twins: Twins, model: Any) -> dict[str, torch.Tensor]:
    """Gradients of both Hugging Face models by our parameter names; those of shared parameters are added."""
    of_generator = {name: p.grad for name, p in twins.generator.named_parameters()}
    of_discriminator = {name: p.grad for name, p in twins.discriminator.named_parameters()}
    gradients = from_hf(of_generator, model, "generator")
    for name, gradient in from_hf(of_discriminator, model, "discriminator").items():
        gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def corrupted_rows(ids: np.ndarray, positions: np.ndarray, weights: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """The rows with the samples of used slots inserted; samples that share a position give the floor of their mean."""
    corrupted = ids.copy()
    for b in range(len(ids)):
        is_used = weights[b] > 0
        for position in set(positions[b][is_used].tolist()):
            samples = sampled[b][(positions[b] == position) & is_used]
            corrupted[b, position] = samples.sum() // len(samples)
    return corrupted


def gumbel_noise(bits: Callable[..., np.ndarray], rows: list[int], num_slots: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise in float64, [rows, slots, V]: slot n of row r draws from number r * num_slots + n."""
    draws = []
    for row in rows:
        draws_of_row = []
        for slot in range(num_slots):
            number = row * num_slots + slot
            draws_of_row.append(bits(row=number, step=STEP, purpose=PURPOSE_SAMPLE, seed=SEED, count=vocab_size))
        draws.append(draws_of_row)
    uniform = (np.array(draws).astype(np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-uniform))


@pytest.mark.parametrize("masking", ["without_replacement", "reference"])
def test_losses_counts_and_gradients_of_a_step_equal_those_of_hugging_faces_models(
    masking: Any,
    tmp_path: Path,
    make_model: Callable[..., Any],
    make_ids: Callable[..., torch.Tensor],
    mirror_masks: Callable[..., Any],
    bits: Callable[..., np.ndarray],
    special: Any,
) -> None:
    """Masks and random bits come from the NumPy mirror, logits from Hugging Face, losses from torch.nn.functional."""
    module, model = make_model(masking=masking, mask_prob=0.25)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
    twins = exported_twins(module, model, special, tmp_path)
    ids = make_ids([64, 47, 20, 60], seq_len=64)
    rows = [40, 41, 42, 43]
    is_real = ids != special.pad
    num_tokens = int(is_real.sum())
    num_masked_tokens = int(num_masked(ids, special, module.objective).sum())

    step_input = StepInput(ids, torch.tensor(rows), STEP, SEED, 1 / num_masked_tokens, 1 / num_tokens)
    ours = module(step_input)
    ours.loss.backward()

    # Hugging Face's generator reads the masked rows.
    layout = derive(ids, special)
    is_same_example = layout.example_BS[:, None, :, None] == layout.example_BS[:, None, None, :]
    layout_inputs = {
        "token_type_ids": layout.token_type_BS,
        "position_ids": layout.position_BS,
        "attention_mask": torch.where(is_same_example, 0.0, -1e30),
    }
    positions, weights, masked_ids = mirror_masks(ids.numpy(), module.objective, SEED, STEP, rows)
    num_slots = positions.shape[1]
    position_BN = torch.from_numpy(positions)
    weight_BN = torch.from_numpy(weights)
    target_BN = ids.gather(1, position_BN)
    mlm_logits = twins.generator(input_ids=torch.from_numpy(masked_ids), **layout_inputs).logits
    slot_logits = mlm_logits.gather(1, position_BN[..., None].expand(-1, -1, model.vocab_size))
    mlm_losses = F.cross_entropy(slot_logits.flatten(0, 1), target_BN.flatten(), reduction="none")
    mlm_sum = (mlm_losses * weight_BN.flatten()).sum()

    # Its samples, by Gumbel-max, corrupt the rows that Hugging Face's discriminator reads.
    noise = gumbel_noise(bits, rows, num_slots, model.vocab_size)
    sampled = (slot_logits.detach().double().numpy() + noise).argmax(-1)
    corrupted = torch.from_numpy(corrupted_rows(ids.numpy(), positions, weights, sampled))
    is_replaced = corrupted != ids
    rtd_logits = twins.discriminator(input_ids=corrupted, **layout_inputs).logits
    rtd_sum = F.binary_cross_entropy_with_logits(rtd_logits[is_real], is_replaced[is_real].float(), reduction="sum")
    loss = mlm_sum / num_masked_tokens + RTD_WEIGHT * rtd_sum / num_tokens
    loss.backward()

    assert torch.equal(ours.label_BS, is_replaced)
    assert (ours.rtd_logit_BS - rtd_logits)[is_real].abs().max() <= 1e-5
    assert ours.loss.item() == pytest.approx(loss.item(), rel=1e-6)

    sums = Sums(*ours.sums.tolist())
    is_predicted_replaced = rtd_logits > 0
    is_original = is_real & ~is_replaced
    assert sums.mlm_loss_sum == pytest.approx(mlm_sum.item(), rel=1e-6)
    assert sums.rtd_loss_sum == pytest.approx(rtd_sum.item(), rel=1e-6)
    assert sums.mlm_weight == num_masked_tokens
    assert sums.tokens == num_tokens
    assert sums.mlm_correct == ((slot_logits.argmax(-1) == target_BN) * weight_BN).sum()
    assert sums.sampled_correct == ((sampled == target_BN.numpy()) * weights).sum()
    assert sums.replaced == is_replaced.sum()
    assert sums.original == is_original.sum()
    assert sums.replaced_correct == (is_replaced & is_predicted_replaced).sum()
    assert sums.original_correct == (is_original & ~is_predicted_replaced).sum()

    expected_gradients = twin_gradients(twins, model)
    for name, parameter in module.towers.named_parameters():
        expected = expected_gradients[name]
        scale = expected.abs().max().clamp(min=1e-3)
        assert (parameter.grad - expected).abs().max() <= 2e-5 * scale, name

    if masking == "reference":  # the case of a position that was drawn twice did occur
        assert len(np.unique(positions[0])) < num_slots


def test_labels_loss_and_sums_of_a_row_do_not_depend_on_the_other_rows_of_its_batch(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    module, _ = make_model()
    ids = make_ids([64, 50, 33, 64], seq_len=64)
    rows = torch.arange(70, 74)

    whole = module(StepInput(ids, rows, STEP, SEED, *SCALES))
    first_part = module(StepInput(ids[:3], rows[:3], STEP, SEED, *SCALES))
    last_part = module(StepInput(ids[3:], rows[3:], STEP, SEED, *SCALES))

    assert torch.equal(torch.cat([first_part.label_BS, last_part.label_BS]), whole.label_BS)
    assert (first_part.loss + last_part.loss).item() == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(first_part.sums + last_part.sums, whole.sums, rtol=1e-6, atol=0)


def test_a_row_of_padding_changes_no_loss_count_or_gradient(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    """All slots of such a row are empty, and its attention sees nothing real; still no number becomes NaN."""
    module, _ = make_model()
    ids = make_ids([64, 0], seq_len=64)

    def output_and_gradients(num_rows: int) -> tuple[Any, list[torch.Tensor]]:
        module.zero_grad()
        out = module(StepInput(ids[:num_rows], torch.arange(num_rows), STEP, SEED, *SCALES))
        out.loss.backward()
        return out, [p.grad.clone() for p in module.parameters()]

    alone, gradients_alone = output_and_gradients(1)
    padded, gradients_padded = output_and_gradients(2)

    assert padded.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    torch.testing.assert_close(padded.sums, alone.sums, rtol=1e-6, atol=0)
    for gradient_alone, gradient_padded in zip(gradients_alone, gradients_padded, strict=True):
        torch.testing.assert_close(gradient_alone, gradient_padded, rtol=1e-4, atol=1e-7)


def test_rows_that_pad_the_embedding_table_get_no_gradient_and_no_share_of_the_softmax(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    """The table has more rows than the vocabulary has tokens. Here those rows would win every softmax."""
    module, model = make_model()
    table = module.towers.embeddings.word.weight
    with torch.no_grad():
        table[model.vocab_size :] = 50.0
    ids = make_ids([64] * 4, seq_len=64)

    out = module(StepInput(ids, torch.arange(4), STEP, SEED, *SCALES))
    out.loss.backward()

    assert not table.grad[model.vocab_size :].any()
    # At most 64 tokens are masked. A uniform guess costs log(V) nats; a share of the padding rows would cost far more.
    mlm_loss_sum = Sums(*out.sums.tolist()).mlm_loss_sum
    assert mlm_loss_sum / 64 < 2 * np.log(model.vocab_size)


def test_the_discriminators_loss_sends_no_gradient_through_samples_to_the_generator(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    module, _ = make_model(mlm_weight=0.0)
    ids = make_ids([64] * 2, 64)

    module(StepInput(ids, torch.arange(2), STEP, SEED, *SCALES)).loss.backward()

    for parameter in module.towers.generator.parameters():
        assert not parameter.grad.any()
    assert module.towers.discriminator.layers[0].expand.weight.grad.any()


@pytest.mark.parametrize("how", ["cast", "autocast"])
def test_in_bf16_losses_are_summed_in_fp32(
    how: str, make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    """The sums then differ from fp32's only by the rounding of features. A sum in bf16 would be off by far more."""
    module, _ = make_model()
    step_input = StepInput(make_ids([64] * 16, seq_len=64), torch.arange(16), STEP, SEED, 1.0, 1.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())

    in_fp32 = module(step_input)
    if how == "cast":
        in_bf16 = module.bfloat16()(step_input)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            in_bf16 = module(step_input)
    in_bf16.loss.backward()

    assert in_bf16.loss.dtype == torch.float32
    assert in_bf16.rtd_logit_BS.dtype == torch.float32
    expected_sums = Sums(*in_fp32.sums.tolist())
    sums = Sums(*in_bf16.sums.tolist())
    assert sums.tokens == expected_sums.tokens
    assert sums.mlm_weight == expected_sums.mlm_weight
    assert sums.mlm_loss_sum == pytest.approx(expected_sums.mlm_loss_sum, rel=2e-3)
    assert sums.rtd_loss_sum == pytest.approx(expected_sums.rtd_loss_sum, rel=2e-2)
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("masking", ["without_replacement", "reference"])
def test_a_step_never_waits_for_values_of_the_device(masking: Any, make_model: Callable[..., Any]) -> None:
    """On the meta device there are no values: any `.item()`, boolean index or data-dependent shape raises."""
    module, _ = make_model(masking=masking)
    module.backend = "reference"
    module.to("meta")
    ids = torch.zeros(4, 64, dtype=torch.int64, device="meta")
    rows = torch.arange(4, device="meta")

    num_masked(ids, module.special, module.objective)
    out = module(StepInput(ids, rows, STEP, SEED, *SCALES))
    out.loss.backward()

    assert out.sums.shape == (len(Sums._fields),)
    assert out.label_BS.shape == ids.shape


def test_dropout_follows_from_the_step_not_from_torchs_seed_and_is_off_in_evaluation_mode(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    module, _ = make_model(dropout=0.1)
    ids = make_ids([64] * 2, seq_len=64)
    step_input = StepInput(ids, torch.arange(2), STEP, SEED, *SCALES)

    def loss_with(torch_seed: int) -> float:
        torch.manual_seed(torch_seed)
        return module(step_input).loss.item()

    first = loss_with(1)
    assert loss_with(1) == first
    assert loss_with(2) == first

    module.eval()
    without_dropout = loss_with(1)
    assert without_dropout != first
    assert loss_with(2) == without_dropout
