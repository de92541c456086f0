"""Backward passes of a layer's norms, GELU and attention in Triton's interpreter, with their sums over tokens."""

import pytest
import torch
from electra_kernels.layer_passes import TokenSums, gelu_gradient, join_gradients, norm_backward, norm_forward
from electra_kernels.operation_types import LayerDropout
from electra_kernels.triton import layer_passes as norm_kernels
from electra_kernels.triton.strip_sums import sum_of_strips

EPS = 1e-12
NUM_STRIPS = 3


class Inputs:
    """Random inputs of a norm and of GELU, rounded to `dtype`, with a dropout and the rows' numbers."""

    def __init__(self, batch, seq_len, hidden, intermediate, probability, dtype, draw):
        self.batch = batch
        num_tokens = batch * seq_len
        states, wide = (num_tokens, hidden), (num_tokens, intermediate)
        # Output of the sub-layer, its input, weight and bias, and gradients; then input and gradient of GELU.
        shapes = [states, states, (hidden,), (hidden,), states, wide, wide]
        self.tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        key_3 = torch.tensor([2**62 + 9, 2**31 + draw, 15])
        row_B = torch.arange(batch) + 2**32 - batch
        self.dropout = LayerDropout(key_3, row_B, "reference", probability, site=1)

    def results(self, precision, backend):
        """Norm, both its gradients, GELU's gradient, and all sums joined, computed with tensors of a precision."""
        tensors = [tensor.to(precision, copy=True) for tensor in self.tensors]
        x, residual, weight, bias, grad, gelu_input, gelu_grad = tensors
        dropout = self.dropout._replace(backend=backend)
        normed, kept = norm_forward(x, residual, weight, bias, EPS, dropout)
        hidden, intermediate = grad.shape[1], gelu_input.shape[1]
        sums = TokenSums(backend, grad, [intermediate, hidden, hidden, hidden])
        grad_gelu_input = gelu_gradient(gelu_grad, gelu_input, sums)
        grad_x, grad_residual = norm_backward(grad, kept, weight, bias, dropout, sums)
        sum_dtype = torch.promote_types(precision, torch.float32)
        return [normed, grad_x, grad_residual, grad_gelu_input, torch.cat(list(sums.totals(sum_dtype)))]


@pytest.mark.parametrize(
    ("batch", "seq_len", "hidden", "intermediate", "probability", "draws"),
    [(2, 4, 12, 24, 0.5, 4), (1, 5, 36, 130, 0.1, 2), (2, 2, 256, 1100, 0.0, 2)],
)
def test_backward_passes_are_no_further_from_float64_than_the_reference(
    monkeypatch, assert_no_worse, assert_rounded, dtype, batch, seq_len, hidden, intermediate, probability, draws
):
    """Norm, gradients and sums are compared in fp32 and count separately, each pooled over independent draws; what is
    stored in 16 bits is their rounding.
    """
    monkeypatch.setattr(norm_kernels, "resident_programs", lambda device, num_warps: NUM_STRIPS)
    if dtype != torch.float32:
        draws = 1  # the arithmetic is that of fp32 inputs
    triples_of_draws = []
    for draw in range(draws):
        inputs = Inputs(batch, seq_len, hidden, intermediate, probability, dtype, draw)
        exact = inputs.results(torch.float64, "reference")
        by_kernel = inputs.results(torch.float32, "triton")
        by_reference = inputs.results(torch.float32, "reference")
        triples_of_draws.append(list(zip(by_kernel, by_reference, exact)))
        if dtype != torch.float32 and draw == 0:
            stored = inputs.results(dtype, "triton")
            for stored_tensor, tensor in zip(stored[:-1], by_kernel[:-1]):
                assert_rounded(stored_tensor, tensor)
            assert torch.equal(stored[-1], by_kernel[-1])  # sums are taken before anything is rounded

    for triples in zip(*triples_of_draws):
        assert_no_worse(list(triples))


def test_gelu_overwrites_its_gradient_and_nothing_beyond_the_columns():
    """The width is no multiple of a block, and the sums are written between other columns."""
    grad, x = torch.randn(5, 1030), torch.randn(5, 1030)
    partials = torch.full((2, 1040), 7.0)
    expected = torch.ops.aten.gelu_backward(grad.double(), x.double())

    out = norm_kernels.gradient_strips(grad, x, partials, first_column=4)

    assert out is grad
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(partials[:, 4:1034].sum(0).double(), expected.sum(0), rtol=1e-5, atol=1e-5)
    assert (partials[:, :4] == 7).all()
    assert (partials[:, 1034:] == 7).all()


@pytest.mark.parametrize("width", [12, 36, 1040])
def test_gradients_of_query_key_and_value_are_joined_bit_for_bit_and_summed_as_well_as_in_float64(
    monkeypatch, assert_no_worse, dtype, width
):
    """Widths that are no multiple of a block, and one of two blocks; the eight strips have eight tokens or seven."""
    monkeypatch.setattr(norm_kernels, "resident_programs", lambda device, num_warps: 8)
    grads = [torch.randn(63, 4, width // 4).to(dtype) for _ in range(3)]
    exact = torch.stack([grad.double() for grad in grads], 1).flatten(1).sum(0)
    joined, total = join_gradients(*grads, torch.float32, "triton")
    reference, _ = join_gradients(*grads, torch.float32, "reference")
    _, total_in_fp32 = join_gradients(*(grad.float() for grad in grads), torch.float32, "reference")

    assert torch.equal(joined, reference)
    assert_no_worse([(total, total_in_fp32, exact)])


@pytest.mark.parametrize(("num_strips", "num_columns"), [(1, 5), (257, 35)])
def test_strips_are_added_up_in_float64_and_rounded_once(assert_rounded, dtype, num_strips, num_columns):
    """Large terms that cancel: in fp32 their sum would lose the small ones."""
    partials = torch.randn(num_strips, num_columns)
    if num_strips > 2:
        partials[0] += 1e6
        partials[-1] -= 1e6
    total = sum_of_strips(partials, dtype)

    assert total.dtype == dtype
    assert_rounded(total, partials.sum(0, dtype=torch.float64).float())
