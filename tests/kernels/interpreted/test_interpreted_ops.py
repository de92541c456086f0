"""Gather, replace and discriminator tail in Triton's interpreter against their references and float64."""

import pytest
import torch
from electra_kernels.discriminator_tail import rtd_loss, rtd_losses_reference
from electra_kernels.dropout_add_norm import dropout_add_norm
from electra_kernels.masked_gather import gather_masked
from electra_kernels.operation_types import DropoutKey
from electra_kernels.replace_tokens import replace_and_label
from electra_kernels.triton import discriminator_tail as tail_kernels
from electra_kernels.triton import dropout_add_norm as norm_kernels
from electra_kernels.triton.compensated_arithmetic import fits_fp32
from electra_kernels.triton.discriminator_tail import forward_pass

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
@pytest.mark.parametrize(("num_tokens", "hidden", "draws"), [(1, 8, 80), (200, 24, 2), (29, 130, 10), (5, 1024, 12)])
def test_tail_error_is_not_larger_than_the_references(
    monkeypatch, assert_no_worse, assert_rounded, dtype, num_tokens, hidden, draws
):
    monkeypatch.setattr(tail_kernels, "NUM_PROGRAMS", 3)  # strips of several tiles
    monkeypatch.setattr(tail_kernels, "fits_fp32", lambda _: fits_fp32(dtype))  # the path of `dtype`
    results = []
    for draw in range(draws if dtype == torch.float32 else draws // 2):  # 16-bit inputs: the same arithmetic
        shapes = [(num_tokens, hidden), (hidden,), (hidden,), (1,)]
        given = [(torch.randn(shape) * scale).to(dtype) for shape, scale in zip(shapes, (1, 1, hidden**-0.5, 1))]
        label, mask = torch.rand(num_tokens) > 0.7, torch.rand(num_tokens) > 0.2
        mask[0] = True

        def run(precision, backend, given=given, label=label, mask=mask):
            tensors = [t.to(precision, copy=True).requires_grad_() for t in given]
            out = rtd_loss(*tensors, label, mask, backend=backend)
            return out, torch.autograd.grad(out.loss_sum, tensors)

        def losses(precision, run_pass, given=given, label=label, mask=mask):
            return run_pass(*(t.to(precision) for t in given), label.to(precision), mask.to(precision))[0]

        _, exact_grads = run(torch.float64, "reference")
        exact = [run(torch.float64, "reference")[0].logits_T, losses(torch.float64, rtd_losses_reference)]
        (out, grads), (ref_out, ref_grads) = run(torch.float32, "triton"), run(torch.float32, "reference")
        assert out[3:] == ref_out[3:]
        values = [out.logits_T, losses(torch.float32, forward_pass)]
        references = [ref_out.logits_T, losses(torch.float32, rtd_losses_reference)]
        results.append(
            [
                *zip(values, references, exact),
                (grads[0], ref_grads[0], exact_grads[0]),
                [torch.cat(parameters[1:]) for parameters in (grads, ref_grads, exact_grads)],
            ]
        )
        if dtype != torch.float32 and draw == 0:
            for backend, expected, expected_grads in (("triton", out, grads), ("reference", ref_out, ref_grads)):
                stored, stored_grads = run(dtype, backend)
                assert torch.equal(stored.logits_T, expected.logits_T)
                for grad, value in zip(stored_grads, expected_grads):
                    assert_rounded(grad, value)
    for triples in zip(*results):
        assert_no_worse(triples)


@DTYPES
@pytest.mark.parametrize(
    ("batch", "seq_len", "hidden", "probability", "draws"),
    [(1, 1, 4, 0.5, 64), (2, 5, 36, 0.1, 8), (2, 3, 256, 0.0, 6), (1, 4, 1024, 0.1, 4)],
)
def test_norm_error_is_not_larger_than_the_references(
    monkeypatch, assert_no_worse, assert_rounded, dtype, batch, seq_len, hidden, probability, draws
):
    monkeypatch.setattr(norm_kernels, "resident_programs", lambda device, num_warps: 3)  # strips of several tokens
    rows = torch.arange(batch) + 2**32 - batch
    results = []
    for draw in range(draws):
        dropout = DropoutKey(probability, seed=2**62 + 9, step=2**31 + draw, site=31)
        shapes = [(batch, seq_len, hidden), (batch, seq_len, hidden), (hidden,), (hidden,)]
        *given, upstream = [torch.randn(shape).to(dtype) for shape in [*shapes, shapes[0]]]

        def run(precision, backend, given=given, upstream=upstream, dropout=dropout):
            tensors = [t.to(precision, copy=True).requires_grad_() for t in given]
            out = dropout_add_norm(*tensors, eps=1e-12, dropout=dropout, row_B=rows, backend=backend)
            return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(precision))]

        exact = run(torch.float64, "reference")
        values, references = run(torch.float32, "triton"), run(torch.float32, "reference")
        triples = list(zip(values, references, exact))
        results.append([*triples[:3], [torch.cat(parameters) for parameters in zip(*triples[3:])]])
        if dtype != torch.float32 and draw == 0:
            for backend, expected in (("triton", values), ("reference", references)):
                for stored, value in zip(run(dtype, backend), expected):
                    assert_rounded(stored, value)
    for triples in zip(*results):
        assert_no_worse(triples)
