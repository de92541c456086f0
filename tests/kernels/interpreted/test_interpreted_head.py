"""The row kernel in Triton's interpreter against the reference and against float64."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from electra_kernels.gumbel_noise import gumbel_from_bits
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.mlm_head import mlm_head_loss_and_sample, row_pass_reference
from electra_kernels.native import cpu_library
from electra_kernels.operation_types import RowOptions
from electra_kernels.sampling import sample
from electra_kernels.triton import mlm_head
from electra_kernels.triton.compensated_arithmetic import fits_fp32
from electra_kernels.triton.mlm_head import exponential, row_pass

cpu_library.row_pass = None  # kernels are held against the definition in torch; this process is theirs alone

# rows, tokens, padded tokens, tokens at a time, draws
CASES = [
    (1, 50, 64, 64, 64),
    (13, 130, 256, 256, 4),
    (2, 1000, 1024, 1024, 24),
    (3, 128, 128, 128, 16),
    (4, 200, 256, 128, 12),
    (3, 30522, 30592, 32768, 4),
]


def inputs(num_rows: int, vocab: int, padded: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    logits = (torch.randn(num_rows, padded) * 3).to(dtype)
    bias = torch.randn(vocab).to(dtype)
    target = torch.randint(vocab, (num_rows,))
    weight = torch.rand(num_rows).mul(1.3).sub(0.3).clamp(min=0)
    return logits, bias, target, weight, torch.arange(num_rows) + 2**31


def exact_pass(logits, bias, target, weight, vocab):
    """Loss and dlogits in float64 from the same (rounded) inputs."""
    z = logits[:, :vocab].double() + bias.double()
    log_softmax = z.log_softmax(1)
    onehot = torch.nn.functional.one_hot(target, vocab)
    return -log_softmax.gather(1, target[:, None])[:, 0], (log_softmax.exp() - onehot) * weight[:, None].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("num_rows", "vocab", "padded", "tile", "draws"), CASES)
def test_error_is_not_larger_than_the_references(
    monkeypatch, assert_no_worse, assert_rounded, dtype, num_rows, vocab, padded, tile, draws
):
    monkeypatch.setattr(mlm_head, "_BLOCK_INTERPRETED", tile)
    monkeypatch.setattr(mlm_head, "fits_fp32", lambda _: fits_fp32(dtype))  # the path of `dtype`
    options = RowOptions(2**62 + 17, 2**31 + 5, vocab, 1.0, disallow_correct=False, with_gradient=True)
    losses, gradients = [], []
    for draw in range(draws):
        logits, bias, *others = inputs(num_rows, vocab, padded, dtype)
        by_reference, by_kernel = (logits.to(torch.float32, copy=True) for _ in range(2))
        reference = row_pass_reference(by_reference, bias.float(), *others, options)
        kernel = row_pass(by_kernel, bias.float(), *others, options)
        assert torch.equal(kernel.best_M, reference.best_M)
        assert torch.equal(kernel.sampled_M, reference.sampled_M)
        assert not by_kernel[:, vocab:].any()
        loss, gradient = exact_pass(logits, bias, *others[:2], vocab)
        losses.append((kernel.loss_M, reference.loss_M, loss))
        gradients.append((by_kernel[:, :vocab], by_reference[:, :vocab], gradient))
        if dtype != torch.float32 and draw == 0:
            for run, stats, values in (
                (row_pass_reference, reference, by_reference),
                (row_pass, kernel, by_kernel),
            ):
                stored = logits.clone()
                for stat, expected in zip(run(stored, bias, *others, options), stats):
                    assert torch.equal(stat, expected)
                assert_rounded(stored, values)
    assert_no_worse(losses)
    assert_no_worse(gradients)


def test_a_confident_row_keeps_its_loss_and_gradient():
    """Where softmax is 1 but for 1e-9, which fp32 cannot tell from 1: no plain formula gets this."""
    logits = torch.zeros(1, 128)
    logits[0, 5] = 25.0
    options = RowOptions(1, 2, 128, 1.0, disallow_correct=False, with_gradient=True)
    weight, target = torch.ones(1), torch.tensor([5])
    exact = torch.log1p(127 * torch.exp(torch.tensor(-25.0, dtype=torch.float64)))
    stats = row_pass(logits, torch.zeros(128), target, weight, torch.arange(1), options)
    assert stats.loss_M.item() == pytest.approx(exact.item(), rel=1e-5)
    assert logits[0, 5].item() == pytest.approx(-exact.item(), rel=1e-2)


def test_a_nan_is_not_swallowed():
    for place in (5, 9):  # beside the target and on it
        logits, bias, _, weight, rows = inputs(1, 100, 128, torch.float32)
        logits[0, place] = math.nan
        options = RowOptions(1, 2, 100, 1.0, disallow_correct=False, with_gradient=True)
        stats = row_pass(logits, bias, torch.tensor([9]), weight, rows, options)
        assert stats.loss_M.isnan().all()
        assert logits[:, :100].isnan().all()


def test_the_bits_are_the_keyed_grids():
    @triton.jit
    def store_bits(out_ptr, seed, row, step, BLOCK: tl.constexpr):
        quad = tl.arange(0, BLOCK // 4).to(tl.uint32)
        zero = quad * 0
        b0, b1, b2, b3 = tl.philox(seed, quad, zero + row, zero + step, zero + 5)
        bits = tl.join(tl.join(b0, b2), tl.join(b1, b3)).reshape(BLOCK)
        tl.store(out_ptr + tl.arange(0, BLOCK), bits.to(tl.int64))

    out = torch.empty(64, dtype=torch.int64)
    store_bits[(1,)](out, 2**62 + 99, 77, 2**31 - 1, BLOCK=64)
    assert torch.equal(out, bits_grid(2**62 + 99, Purpose.SAMPLE, 2**31 - 1, torch.tensor([77]), 64)[0])


def test_the_noise_is_finite_and_exact_at_both_ends():
    @triton.jit
    def store_exponential(bits_ptr, out_ptr, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(out_ptr + index, exponential(tl.load(bits_ptr + index).to(tl.uint32), False))

    ends = [0, 1, (1 << 27) - 1, 1 << 27, 1 << 31, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    bits, out = torch.tensor(ends), torch.empty(8)
    store_exponential[(1,)](bits, out, BLOCK=8)
    exact = np.array([-math.log1p(-(b + 0.5) * 2.0**-32) for b in ends])
    np.testing.assert_allclose(out.numpy(), exact, rtol=1e-6)
    np.testing.assert_allclose(-out.log().numpy(), gumbel_from_bits(bits).numpy(), rtol=1e-6)


@pytest.mark.parametrize("tile", [64, 256, 4096])
def test_samples_are_the_references_for_any_tile_and_split(monkeypatch, tile):
    monkeypatch.setattr(mlm_head, "_BLOCK_INTERPRETED", tile)
    logits, rows = torch.randn(6, 501), torch.arange(6) + 2**32 - 6
    expected = sample(logits, seed=5, step=6, row_M=rows, backend="reference")
    assert torch.equal(sample(logits, seed=5, step=6, row_M=rows, backend="triton"), expected)
    parts = [sample(logits[s], seed=5, step=6, row_M=rows[s], backend="triton") for s in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(parts), expected)


def test_samples_equal_a_float64_sampler_where_the_gap_decides(exact_sample):
    logits, rows = torch.randn(60, 999) * 2, torch.arange(60)
    for temperature in (1.0, 0.6):
        drawn = sample(logits, seed=1, step=2, row_M=rows, temperature=temperature, backend="triton")
        expected, gap = exact_sample(logits.numpy(), 1, 2, rows.numpy(), temperature)
        assert (drawn.numpy() == expected)[gap > 1e-4].all()


def test_ties_go_to_the_lower_token():
    logits = torch.full((2, 70), -1.0e30)
    logits[:, 61] = logits[:, 33] = logits[:, 69] = 1.0e30
    assert sample(logits, seed=3, step=1, row_M=torch.arange(2), backend="triton").tolist() == [33, 33]


def test_forbidden_tokens_and_forbidden_targets():
    logits, bias, target, weight, rows = inputs(40, 6, 128, torch.float32)
    bias = torch.tensor([0.0, -math.inf, 0.0, 0.0, -math.inf, 0.0])
    target = torch.full_like(target, 3)
    options = RowOptions(7, 8, 6, 1.0, disallow_correct=True, with_gradient=False)
    drawn = row_pass(logits, bias, target, weight, rows, options).sampled_M
    assert set(drawn.tolist()) == {0, 2, 5}
    assert torch.equal(drawn, row_pass_reference(logits, bias, target, weight, rows, options).sampled_M)


@pytest.mark.parametrize("chunk", [4096, 3])
def test_the_public_head(chunk):
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
    for a, b in zip((*outs[0], *grads[0]), (*outs[1], *grads[1])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_all_weights_zero():
    logits, bias, target, weight, rows = inputs(5, 100, 128, torch.float32)
    options = RowOptions(7, 8, 100, 1.0, disallow_correct=False, with_gradient=True)
    stats = row_pass(logits, bias, target, torch.zeros_like(weight), rows, options)
    assert stats.loss_M.isfinite().all()
    assert not logits.any()
