"""The discriminator tail in plain PyTorch: its loss, logits, counts and gradients."""

import pytest
import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import rtd_loss


def inputs(num_tokens: int, hidden: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Random activations, their bias, weights and bias of the output layer, labels, and the mask of real tokens."""
    shapes = [(num_tokens, hidden), (hidden,), (hidden,), (1,)]
    floats = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return [*floats, torch.rand(num_tokens) > 0.7, torch.rand(num_tokens) > 0.2]


def test_loss_logits_and_counts_are_those_of_binary_cross_entropy_over_real_tokens():
    dense, bias, out_weight, out_bias, label, mask = inputs(50, 8)

    out = rtd_loss(dense, bias, out_weight, out_bias, label, mask)

    logits = F.linear(F.gelu(dense + bias), out_weight[None], out_bias)[:, 0]
    expected = F.binary_cross_entropy_with_logits(logits[mask], label[mask].double(), reduction="sum")
    assert torch.allclose(out.loss_sum, expected, rtol=1e-12)
    assert torch.allclose(out.logits_T, logits, rtol=1e-12)
    assert not out.logits_T.requires_grad
    is_predicted_replaced = logits > 0
    is_replaced = label & mask
    is_original = ~label & mask
    assert float(out.mask_sum) == float(mask.sum())
    assert float(out.replaced_correct) == float((is_replaced & is_predicted_replaced).sum())
    assert float(out.replaced_count) == float(is_replaced.sum())
    assert float(out.original_correct) == float((is_original & ~is_predicted_replaced).sum())
    assert float(out.original_count) == float(is_original.sum())


def test_gradients_pass_gradcheck_in_float64():
    *floats, label, mask = inputs(7, 5)

    def loss_of(*tensors: torch.Tensor) -> torch.Tensor:
        return rtd_loss(*tensors, label, mask).loss_sum

    assert torch.autograd.gradcheck(loss_of, floats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_of_20000_gives_the_exact_loss_and_finite_gradients(dtype):
    """Every logit is 100 * 50 * (6 - 2) = 20000, so two tokens with label 0 cost 20000 nats each, the others 0."""
    dense = torch.full((4, 8), 100.0, dtype=dtype, requires_grad=True)
    weight = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0], dtype=dtype) * 50

    out = rtd_loss(
        dense,
        torch.zeros(8, dtype=dtype),
        weight,
        torch.zeros(1, dtype=dtype),
        torch.tensor([0, 1, 0, 1]),
        torch.ones(4),
    )
    out.loss_sum.backward()

    assert out.loss_sum.item() == pytest.approx(2 * 20000)
    assert dense.grad.isfinite().all()
    assert out.loss_sum.dtype == torch.float32
