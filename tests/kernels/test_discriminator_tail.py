"""The discriminator tail against float64 autograd, its counts, and the CUDA twin's own source run on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import rtd_loss


def inputs(num_tokens: int, hidden: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = [(num_tokens, hidden), (hidden,), (hidden,), (1,)]
    floats = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return [*floats, torch.rand(num_tokens) > 0.7, torch.rand(num_tokens) > 0.2]


def test_loss_is_binary_cross_entropy_of_the_head():
    dense, bias, out_weight, out_bias, label, mask = given = inputs(50, 8)
    out = rtd_loss(*given)
    logits = F.linear(F.gelu(dense + bias), out_weight[None], out_bias)[:, 0]
    expected = F.binary_cross_entropy_with_logits(logits[mask], label[mask].double(), reduction="sum")
    assert torch.allclose(out.loss_sum, expected, rtol=1e-12)
    assert torch.allclose(out.logits_T, logits, rtol=1e-12)
    assert not out.logits_T.requires_grad
    called = logits > 0
    counts = [mask.sum(), (called & label & mask).sum(), (label & mask).sum()]
    counts += [(~called & ~label & mask).sum(), (~label & mask).sum()]
    assert [float(x) for x in (out.mask_sum, *out[3:])] == [float(x) for x in counts]


def test_gradcheck_in_float64():
    *floats, label, mask = inputs(7, 5)
    assert torch.autograd.gradcheck(lambda *tensors: rtd_loss(*tensors, label, mask).loss_sum, floats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype):
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
    assert out.loss_sum.item() == pytest.approx(2 * 20000)
    out.loss_sum.backward()
    assert dense.grad.isfinite().all()
    assert out.loss_sum.dtype == torch.float32
