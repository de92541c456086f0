"""Gather, replace and discriminator tail in Triton's interpreter against their references and float64."""

import pytest
import torch
from electra_kernels.discriminator_tail import rtd_loss, rtd_losses_reference
from electra_kernels.discriminator_tail_triton import forward_pass
from electra_kernels.dropout_add_norm import DropoutKey, dropout_add_norm
from electra_kernels.masked_gather import gather_masked
from electra_kernels.replace import replace_and_label

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "seq_len", "num_slots", "hidden"), [(1, 1, 1, 1), (2, 21, 11, 24), (1, 20, 33, 70)]
)
def test_gather_backward(dtype, num_rows, seq_len, num_slots, hidden):
    states = torch.randn(num_rows, seq_len, hidden).to(dtype).requires_grad_()
    positions = torch.randint(seq_len, (num_rows, num_slots))
    positions[0, num_slots // 2 :] = 0
    upstream = torch.randn(num_rows * num_slots, hidden).to(dtype)
    by_reference, by_kernel = (
        torch.autograd.grad(gather_masked(states, positions, backend=backend), states, upstream)[0]
        for backend in ("reference", "triton")
    )
    # The interpreter truncates where hardware rounds to the nearest bf16: one unit in the last place.
    allowed = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(by_kernel, by_reference, rtol=allowed, atol=0.0)


@pytest.mark.parametrize(("num_rows", "seq_len", "num_slots"), [(1, 1, 1), (3, 130, 11), (2, 64, 40)])
def test_replace_and_label(num_rows, seq_len, num_slots):
    ids = torch.randint(30000, (num_rows, seq_len))
    positions = torch.randint(seq_len, (num_rows, num_slots))
    weight = (torch.rand(num_rows, num_slots) > 0.4).float()
    sampled = torch.where(torch.rand(num_rows, num_slots) > 0.5, ids.gather(1, positions), 123)
    for weights in (weight, torch.zeros_like(weight)):
        expected = replace_and_label(ids, positions, weights, sampled.flatten(), backend="reference")
        got = replace_and_label(ids, positions, weights, sampled.flatten(), backend="triton")
        for a, b in zip(got, expected):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 8), (200, 24), (29, 130), (5, 1024)])
def test_tail_error_is_not_larger_than_the_references(assert_no_worse, dtype, num_tokens, hidden):
    shapes = [(num_tokens, hidden), (hidden,), (hidden,), (1,)]

    def run(tensors, label, mask, backend):
        out = rtd_loss(*tensors, label, mask, backend=backend)
        dense, *parameters = torch.autograd.grad(out.loss_sum, tensors)
        return out[3:], [out.logits_T, dense, torch.cat(parameters)]

    results, losses = [], []
    for _ in range(16 if num_tokens == 1 else 4):
        given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        label, mask = torch.rand(num_tokens) > 0.7, torch.rand(num_tokens) > 0.2
        mask[0] = True
        exactly = [t.detach().double().requires_grad_() for t in given]
        _, exact = run(exactly, label, mask, "reference")
        counts, by_reference = run(given, label, mask, "reference")
        kernel_counts, by_kernel = run(given, label, mask, "triton")
        assert counts == kernel_counts
        results.append(list(zip(by_kernel, by_reference, exact)))
        with torch.no_grad():
            passes = [(forward_pass, given, torch.float32), (rtd_losses_reference, given, torch.float32)]
            passes += [(rtd_losses_reference, exactly, torch.float64)]
            losses.append([run_pass(*tensors, label.to(t), mask.to(t))[0] for run_pass, tensors, t in passes])
    assert_no_worse(losses, torch.float32)
    for triples in zip(*results):
        assert_no_worse(list(triples), triples[0][0].dtype)


@DTYPES
@pytest.mark.parametrize(
    ("batch", "seq_len", "hidden", "probability"), [(1, 1, 4, 0.5), (2, 5, 36, 0.1), (2, 3, 256, 0.0)]
)
def test_norm_error_is_not_larger_than_the_references(assert_no_worse, dtype, batch, seq_len, hidden, probability):
    dropout = DropoutKey(probability, seed=2**62 + 9, step=2**31 + 1, site=31)
    rows = torch.arange(batch) + 2**32 - batch

    def run(tensors, upstream, backend):
        out = dropout_add_norm(*tensors, eps=1e-12, dropout=dropout, row_B=rows, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]

    results = []
    for _ in range(8 if batch == 1 else 3):
        shapes = [(batch, seq_len, hidden), (batch, seq_len, hidden), (hidden,), (hidden,)]
        given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        upstream = torch.randn(shapes[0]).to(dtype)
        exact = run([t.detach().double().requires_grad_() for t in given], upstream.double(), "reference")
        results.append(list(zip(run(given, upstream, "triton"), run(given, upstream, "reference"), exact)))
    for triples in zip(*results):
        assert_no_worse(list(triples), dtype)
