"""The row kernel in Triton's interpreter against the reference and against float64."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.mlm_head import gumbel_from_bits, mlm_head_loss_and_sample, row_pass_reference, sample_reference
from electra_kernels.native import cpu_library
from electra_kernels.operation_types import RowOptions
from electra_kernels.triton import mlm_head
from electra_kernels.triton.arithmetic import fits_fp32
from electra_kernels.triton.mlm_head import exponential, row_pass

cpu_library.row_pass = None  # the reference is then the definition in torch; no other tests run in this process

CASES = [  # rows, tokens, tokens with padding, tokens in a tile of the kernel, draws
    (1, 50, 64, 64, 64),
    pytest.param(13, 130, 256, 256, 4, marks=pytest.mark.sample),
    pytest.param(2, 1000, 1024, 1024, 24, marks=pytest.mark.sample),
    pytest.param(3, 128, 128, 128, 16, marks=pytest.mark.sample),
    (4, 200, 256, 128, 12),
    (3, 30522, 30592, 32768, 4),
]


def inputs(num_rows: int, vocab: int, padded: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random logits, bias, targets, weights (about a quarter of them 0) and row numbers."""
    logits = (torch.randn(num_rows, padded) * 3).to(dtype)
    bias = torch.randn(vocab).to(dtype)
    target = torch.randint(vocab, (num_rows,))
    weight = torch.rand(num_rows).mul(1.3).sub(0.3).clamp(min=0)
    return logits, bias, target, weight, torch.arange(num_rows) + 2**31


def sample(logits: torch.Tensor, seed: int, step: int, rows: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the kernel's token of each row of fp32 logits without a bias."""
    num_rows, vocab = logits.shape
    options = RowOptions(seed, step, vocab, temperature, disallow_correct=False, with_gradient=False)
    targets = torch.zeros(num_rows, dtype=torch.int64)
    return row_pass(logits, torch.zeros(vocab), targets, torch.ones(num_rows), rows, options).sampled_M


def float64_loss_and_gradient(logits, bias, target, weight, vocab):
    """Loss of each row and its gradient for the logits, in float64 from the same (rounded) inputs."""
    log_softmax = (logits[:, :vocab].double() + bias.double()).log_softmax(1)
    loss = -log_softmax.gather(1, target[:, None])[:, 0]
    is_target = torch.nn.functional.one_hot(target, vocab)
    gradient = (log_softmax.exp() - is_target) * weight[:, None].double()
    return loss, gradient


@pytest.mark.parametrize(("num_rows", "vocab", "padded", "tile", "draws"), CASES)
def test_losses_and_gradients_are_no_further_from_float64_than_the_references(
    monkeypatch, assert_no_worse, assert_rounded, dtype, num_rows, vocab, padded, tile, draws
):
    """The fp32 values are compared, pooled over independent draws; what is stored in 16 bits is their rounding."""
    monkeypatch.setattr(mlm_head, "_BLOCK_INTERPRETED", tile)
    monkeypatch.setattr(mlm_head, "fits_fp32", lambda _: fits_fp32(dtype))  # the path of `dtype`
    options = RowOptions(2**62 + 17, 2**31 + 5, vocab, 1.0, disallow_correct=False, with_gradient=True)

    loss_triples = []
    gradient_triples = []
    for draw in range(draws):
        logits, bias, target, weight, rows = inputs(num_rows, vocab, padded, dtype)
        # Each pass overwrites its logits with their gradient.
        by_reference = logits.to(torch.float32, copy=True)
        by_kernel = logits.to(torch.float32, copy=True)
        reference = row_pass_reference(by_reference, bias.float(), target, weight, rows, options)
        kernel = row_pass(by_kernel, bias.float(), target, weight, rows, options)

        assert torch.equal(kernel.best_M, reference.best_M)
        assert torch.equal(kernel.sampled_M, reference.sampled_M)
        assert not by_kernel[:, vocab:].any()
        exact_loss, exact_gradient = float64_loss_and_gradient(logits, bias, target, weight, vocab)
        loss_triples.append((kernel.loss_M, reference.loss_M, exact_loss))
        gradient_triples.append((by_kernel[:, :vocab], by_reference[:, :vocab], exact_gradient))

        if dtype != torch.float32 and draw == 0:
            for run_pass, fp32_stats, fp32_gradient in (
                (row_pass_reference, reference, by_reference),
                (row_pass, kernel, by_kernel),
            ):
                stored_gradient = logits.clone()
                stats = run_pass(stored_gradient, bias, target, weight, rows, options)
                for stat, fp32_stat in zip(stats, fp32_stats):
                    assert torch.equal(stat, fp32_stat)
                assert_rounded(stored_gradient, fp32_gradient)

    assert_no_worse(loss_triples)
    assert_no_worse(gradient_triples)


def test_a_target_of_probability_almost_1_keeps_its_loss_and_gradient():
    """1 - softmax is 1.8e-9 at the target, and fp32 cannot tell softmax from 1: log(softmax) in fp32 would be 0."""
    vocab, target, logit = 128, 5, 25.0
    logits = torch.zeros(1, vocab)
    logits[0, target] = logit
    options = RowOptions(1, 2, vocab, 1.0, disallow_correct=False, with_gradient=True)
    exact_loss = torch.log1p((vocab - 1) * torch.exp(torch.tensor(-logit, dtype=torch.float64))).item()

    stats = row_pass(logits, torch.zeros(vocab), torch.tensor([target]), torch.ones(1), torch.arange(1), options)

    gradient = logits  # overwritten in place
    assert stats.loss_M.item() == pytest.approx(exact_loss, rel=1e-5)
    assert gradient[0, target].item() == pytest.approx(-exact_loss, rel=1e-2)


def test_a_nan_logit_makes_the_loss_and_the_whole_gradient_of_its_row_nan():
    vocab, target = 100, 9
    for nan_position in (5, target):
        logits, bias, _, weight, rows = inputs(1, vocab, 128, torch.float32)
        logits[0, nan_position] = math.nan
        options = RowOptions(1, 2, vocab, 1.0, disallow_correct=False, with_gradient=True)

        stats = row_pass(logits, bias, torch.tensor([target]), weight, rows, options)

        gradient = logits  # overwritten in place
        assert stats.loss_M.isnan().all()
        assert gradient[:, :vocab].isnan().all()


def test_random_bits_in_a_kernel_are_those_of_bits_grid():
    """The kernel's `tl.philox` must draw what torch draws for the same seed, step, row and purpose."""

    @triton.jit
    def store_bits(out_ptr, seed, row, step, BLOCK: tl.constexpr):
        quad = tl.arange(0, BLOCK // 4).to(tl.uint32)
        zero = quad * 0
        b0, b1, b2, b3 = tl.philox(seed, quad, zero + row, zero + step, zero + 5)  # 5: Purpose.SAMPLE
        bits = tl.join(tl.join(b0, b2), tl.join(b1, b3)).reshape(BLOCK)
        tl.store(out_ptr + tl.arange(0, BLOCK), bits.to(tl.int64))

    out = torch.empty(64, dtype=torch.int64)
    store_bits[(1,)](out, 2**62 + 99, 77, 2**31 - 1, BLOCK=64)
    assert torch.equal(out, bits_grid(2**62 + 99, Purpose.SAMPLE, 2**31 - 1, torch.tensor([77]), 64)[0])


def test_noise_of_the_lowest_and_highest_random_words_is_finite_and_exact():
    """The kernel's exponential variate is -log(1 - u), and Gumbel noise is minus its logarithm."""

    @triton.jit
    def store_exponential(bits_ptr, out_ptr, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(out_ptr + index, exponential(tl.load(bits_ptr + index).to(tl.uint32), False))

    ends = [0, 1, (1 << 27) - 1, 1 << 27, 1 << 31, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    bits = torch.tensor(ends)
    out = torch.empty(8)
    store_exponential[(1,)](bits, out, BLOCK=8)
    exact = np.array([-math.log1p(-(b + 0.5) * 2.0**-32) for b in ends])
    np.testing.assert_allclose(out.numpy(), exact, rtol=1e-6)
    np.testing.assert_allclose(-out.log().numpy(), gumbel_from_bits(bits).numpy(), rtol=1e-6)


@pytest.mark.parametrize("tile", [64, 256, 4096])
def test_samples_are_the_references_for_any_tile_and_any_split_of_the_rows(monkeypatch, tile):
    monkeypatch.setattr(mlm_head, "_BLOCK_INTERPRETED", tile)
    logits = torch.randn(6, 501)
    rows = torch.arange(6) + 2**32 - 6

    expected = sample_reference(logits, 5, 6, rows)
    whole = sample(logits, 5, 6, rows)
    first_two = sample(logits[:2], 5, 6, rows[:2])
    last_four = sample(logits[2:], 5, 6, rows[2:])

    assert torch.equal(whole, expected)
    assert torch.equal(torch.cat([first_two, last_four]), expected)


def test_samples_are_those_of_a_float64_sampler_where_the_best_score_is_clear(exact_sample):
    """Scores closer than 1e-4 may be ordered differently in fp32."""
    logits = torch.randn(60, 999) * 2
    rows = torch.arange(60)

    for temperature in (1.0, 0.6):
        drawn = sample(logits, 1, 2, rows, temperature)
        expected, gap = exact_sample(logits.numpy(), 1, 2, rows.numpy(), temperature)
        is_clear = gap > 1e-4
        assert (drawn.numpy() == expected)[is_clear].all()


def test_the_lowest_of_equally_good_tokens_is_drawn():
    """Beside 1e30 the noise is less than a rounding error, so equal logits are equal scores."""
    logits = torch.full((2, 70), -1.0e30)
    logits[:, 61] = logits[:, 33] = logits[:, 69] = 1.0e30

    sampled = sample(logits, 3, 1, torch.arange(2))

    assert sampled.tolist() == [33, 33]


def test_tokens_of_bias_minus_infinity_and_disallowed_targets_are_never_drawn():
    """Tokens 1 and 4 are impossible and 3 is the target, which leaves 0, 2 and 5 of six."""
    logits, bias, target, weight, rows = inputs(40, 6, 128, torch.float32)
    bias = torch.tensor([0.0, -math.inf, 0.0, 0.0, -math.inf, 0.0])
    target = torch.full_like(target, 3)
    options = RowOptions(7, 8, 6, 1.0, disallow_correct=True, with_gradient=False)
    drawn = row_pass(logits, bias, target, weight, rows, options).sampled_M
    assert set(drawn.tolist()) == {0, 2, 5}
    assert torch.equal(drawn, row_pass_reference(logits, bias, target, weight, rows, options).sampled_M)


@pytest.mark.parametrize("chunk", [4096, 3])
def test_output_and_gradients_of_the_whole_head_are_the_references_for_any_chunk(chunk):
    x, table = torch.randn(11, 8, requires_grad=True), torch.randn(128, 8, requires_grad=True)
    bias = torch.randn(90, requires_grad=True)
    target, weight = torch.randint(90, (11,)), torch.tensor([0.0, 1, 1, 0, 2, 1, 1, 1, 0, 0.5, 1])
    outs, grads = [], []
    for backend in ("reference", "triton"):
        out = mlm_head_loss_and_sample(
            *(x, table, bias, target, weight),
            seed=3,
            step=4,
            row_M=torch.arange(11),
            vocab_size=90,
            chunk=chunk,
            backend=backend,
        )
        outs.append(out)
        grads.append(torch.autograd.grad(out.loss_sum, (x, table, bias)))
    assert torch.equal(outs[0].sampled_M, outs[1].sampled_M)
    reference_tensors = (*outs[0], *grads[0])
    triton_tensors = (*outs[1], *grads[1])
    for expected, tensor in zip(reference_tensors, triton_tensors):
        torch.testing.assert_close(expected, tensor, rtol=1e-5, atol=1e-6)


def test_rows_of_weight_zero_have_finite_losses_and_no_gradient():
    logits, bias, target, weight, rows = inputs(5, 100, 128, torch.float32)
    options = RowOptions(7, 8, 100, 1.0, disallow_correct=False, with_gradient=True)
    stats = row_pass(logits, bias, target, torch.zeros_like(weight), rows, options)
    assert stats.loss_M.isfinite().all()
    gradient = logits  # overwritten in place
    assert not gradient.any()
