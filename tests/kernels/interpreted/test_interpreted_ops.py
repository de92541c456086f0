"""Gather, replace, discriminator tail and dropout-add-norm in Triton's interpreter against references and float64."""

import pytest
import torch
from electra_kernels.discriminator_tail import rtd_loss, rtd_losses_reference
from electra_kernels.keyed_dropout import keyed_dropout
from electra_kernels.layer_passes import dropout_add_norm
from electra_kernels.operation_types import LayerDropout
from electra_kernels.slots import gather_masked, replace_and_label
from electra_kernels.triton import discriminator_tail as tail_kernels
from electra_kernels.triton import layer_passes as norm_kernels
from electra_kernels.triton.arithmetic import fits_fp32
from electra_kernels.triton.discriminator_tail import forward_pass


@pytest.mark.parametrize(
    ("num_rows", "seq_len", "num_slots", "hidden"), [(1, 1, 1, 1), (2, 21, 11, 24), (1, 20, 33, 70)]
)
def test_gradient_of_gather_is_the_references(dtype, num_rows, seq_len, num_slots, hidden):
    states = torch.randn(num_rows, seq_len, hidden).to(dtype).requires_grad_()
    positions = torch.randint(seq_len, (num_rows, num_slots))
    positions[0, num_slots // 2 :] = 0  # many slots share position 0, as empty slots do
    upstream = torch.randn(num_rows * num_slots, hidden).to(dtype)

    def gradient_by(backend):
        gathered = gather_masked(states, positions, backend=backend)
        return torch.autograd.grad(gathered, states, upstream)[0]

    # The interpreter truncates where hardware rounds to the nearest bf16: one unit in the last place.
    allowed = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(gradient_by("triton"), gradient_by("reference"), rtol=allowed, atol=0.0)


@pytest.mark.parametrize(("num_rows", "seq_len", "num_slots"), [(1, 1, 1), (3, 130, 11), (2, 64, 40)])
def test_corrupted_ids_and_labels_are_the_references(num_rows, seq_len, num_slots):
    ids = torch.randint(30000, (num_rows, seq_len))
    positions = torch.randint(seq_len, (num_rows, num_slots))
    some_slots_used = (torch.rand(num_rows, num_slots) > 0.4).float()
    no_slot_used = torch.zeros_like(some_slots_used)
    sampled = torch.where(torch.rand(num_rows, num_slots) > 0.5, ids.gather(1, positions), 123).flatten()

    for weights in (some_slots_used, no_slot_used):
        expected = replace_and_label(ids, positions, weights, sampled, backend="reference")
        by_kernel = replace_and_label(ids, positions, weights, sampled, backend="triton")

        for tensor, expected_tensor in zip(by_kernel, expected):
            assert tensor.dtype == expected_tensor.dtype
            assert torch.equal(tensor, expected_tensor)


class TailInputs:
    """Random inputs of the discriminator tail, rounded to `dtype`; 30 % of the tokens are replaced and 80 % real."""

    def __init__(self, num_tokens, hidden, dtype):
        # Activations, their bias, and the weights and bias of the output layer.
        shapes = [(num_tokens, hidden), (hidden,), (hidden,), (1,)]
        scales = [1, 1, hidden**-0.5, 1]
        self.tensors = [(torch.randn(shape) * scale).to(dtype) for shape, scale in zip(shapes, scales)]
        self.label = torch.rand(num_tokens) > 0.7
        self.mask = torch.rand(num_tokens) > 0.2
        self.mask[0] = True

    def output_and_gradients(self, precision, backend):
        """Output of the tail, and the gradients of all tensors, computed with tensors of a precision."""
        tensors = [tensor.to(precision, copy=True).requires_grad_() for tensor in self.tensors]
        out = rtd_loss(*tensors, self.label, self.mask, backend=backend)
        return out, torch.autograd.grad(out.loss_sum, tensors)

    def losses(self, precision, run_pass):
        """The loss of every token, by a function with the arguments of `rtd_losses_reference`."""
        tensors = [tensor.to(precision) for tensor in self.tensors]
        return run_pass(*tensors, self.label.to(precision), self.mask.to(precision))[0]


def compare_tail(inputs):
    """Triples (kernel, reference, exact) of logits, losses, gradient of the activations, and other gradients."""
    exact_out, exact_grads = inputs.output_and_gradients(torch.float64, "reference")
    exact_losses = inputs.losses(torch.float64, rtd_losses_reference)
    out, grads = inputs.output_and_gradients(torch.float32, "triton")
    reference_out, reference_grads = inputs.output_and_gradients(torch.float32, "reference")
    losses = inputs.losses(torch.float32, forward_pass)
    reference_losses = inputs.losses(torch.float32, rtd_losses_reference)
    counts, reference_counts = out[3:], reference_out[3:]
    assert counts == reference_counts
    return [
        (out.logits_T, reference_out.logits_T, exact_out.logits_T),
        (losses, reference_losses, exact_losses),
        (grads[0], reference_grads[0], exact_grads[0]),
        tuple(torch.cat(gradients[1:]) for gradients in (grads, reference_grads, exact_grads)),
    ]


@pytest.mark.parametrize(("num_tokens", "hidden", "draws"), [(1, 8, 80), (200, 24, 2), (29, 130, 10), (5, 1024, 12)])
def test_discriminator_tail_is_no_further_from_float64_than_the_reference(
    monkeypatch, assert_no_worse, assert_rounded, dtype, num_tokens, hidden, draws
):
    """The fp32 values are compared; what is stored in 16 bits is their rounding. Logits, losses and gradients count
    separately, each pooled over independent draws.
    """
    monkeypatch.setattr(tail_kernels, "NUM_PROGRAMS", 3)  # strips of several tiles
    monkeypatch.setattr(tail_kernels, "fits_fp32", lambda _: fits_fp32(dtype))  # the path of `dtype`
    if dtype != torch.float32:
        draws = draws // 2  # the arithmetic is that of fp32 inputs, so fewer draws are enough

    triples_of_draws = []
    for draw in range(draws):
        inputs = TailInputs(num_tokens, hidden, dtype)
        triples_of_draws.append(compare_tail(inputs))
        if dtype != torch.float32 and draw == 0:
            for backend in ("triton", "reference"):
                out, grads = inputs.output_and_gradients(torch.float32, backend)
                stored, stored_grads = inputs.output_and_gradients(dtype, backend)
                assert torch.equal(stored.logits_T, out.logits_T)
                for stored_grad, grad in zip(stored_grads, grads):
                    assert_rounded(stored_grad, grad)

    for triples in zip(*triples_of_draws):
        assert_no_worse(list(triples))


@pytest.mark.parametrize(
    ("batch", "seq_len", "hidden", "probability", "draws"),
    [(1, 1, 4, 0.5, 64), (2, 5, 36, 0.1, 8), (2, 3, 256, 0.0, 6), (1, 4, 1024, 0.1, 4)],
)
def test_dropout_add_norm_is_no_further_from_float64_than_the_reference(
    monkeypatch, assert_no_worse, assert_rounded, dtype, batch, seq_len, hidden, probability, draws
):
    """Output and gradients are compared in fp32 and count separately, each pooled over independent draws; what is
    stored in 16 bits is their rounding.
    """
    monkeypatch.setattr(norm_kernels, "resident_programs", lambda device, num_warps: 3)  # strips of several tokens
    rows = torch.arange(batch) + 2**32 - batch
    triples_of_draws = []
    for draw in range(draws):
        key = torch.tensor([2**62 + 9, 2**31 + draw, 15])
        states_shape = (batch, seq_len, hidden)
        # Output of the sub-layer, its input, weight and bias of the LayerNorm, and the upstream gradient.
        shapes = [states_shape, states_shape, (hidden,), (hidden,), states_shape]
        *inputs, upstream = [torch.randn(shape).to(dtype) for shape in shapes]

        def output_and_gradients(precision, backend, inputs=inputs, upstream=upstream, key=key):
            tensors = [tensor.to(precision, copy=True).requires_grad_() for tensor in inputs]
            out, _ = dropout_add_norm(*tensors, rows, key, 1, probability, 1e-12, backend)
            return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(precision))]

        exact = output_and_gradients(torch.float64, "reference")
        by_kernel = output_and_gradients(torch.float32, "triton")
        by_reference = output_and_gradients(torch.float32, "reference")
        output_triple, x_triple, residual_triple, *parameter_triples = zip(by_kernel, by_reference, exact)
        pooled_parameter_triple = tuple(torch.cat(gradients) for gradients in zip(*parameter_triples))
        triples_of_draws.append([output_triple, x_triple, residual_triple, pooled_parameter_triple])
        if dtype != torch.float32 and draw == 0:
            for backend, values in (("triton", by_kernel), ("reference", by_reference)):
                for stored, value in zip(output_and_gradients(dtype, backend), values):
                    assert_rounded(stored, value)

    for triples in zip(*triples_of_draws):
        assert_no_worse(list(triples))


@pytest.mark.parametrize(("batch", "seq_len", "hidden"), [(1, 1, 1), (3, 7, 24), (2, 5, 410)])
def test_keyed_dropout_and_its_gradient_are_the_references(dtype, batch, seq_len, hidden):
    """One product in fp32 is rounded once in both, so the values are equal; only bf16 stores differ by truncation."""
    rows = torch.arange(batch) + 2**32 - batch
    key_3 = torch.tensor([2**62 + 9, 2**31 + 5, 0])
    x, upstream = torch.randn(2, batch, seq_len, hidden).to(dtype)

    def output_and_gradient(backend):
        states = x.clone().requires_grad_()
        out = keyed_dropout(states, LayerDropout(key_3, rows, backend, probability=0.3))
        return out.detach(), torch.autograd.grad(out, states, upstream)[0]

    allowed = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    for by_kernel, by_reference in zip(output_and_gradient("triton"), output_and_gradient("reference")):
        torch.testing.assert_close(by_kernel, by_reference, rtol=allowed, atol=0.0)
