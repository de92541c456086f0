"""Dropout + add + LayerNorm: plain torch without dropout, the right share dropped, the same elements for any split."""

import pytest
import torch
import torch.nn.functional as F
from electra_kernels.dropout_add_norm import dropout_add_norm, keep_scale
from electra_kernels.operation_types import DropoutKey

ROWS = torch.tensor([7, 2**32 - 1, 0])


def inputs(hidden: int = 12) -> list[torch.Tensor]:
    shapes = [(3, 5, hidden), (3, 5, hidden), (hidden,), (hidden,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_without_dropout_it_is_torchs_layer_norm():
    x, residual, weight, bias = given = inputs()
    out = dropout_add_norm(*given, eps=1e-5, dropout=DropoutKey(0.0, 1, 2, 3), row_B=ROWS)
    torch.testing.assert_close(out, F.layer_norm(x + residual, (12,), weight, bias, 1e-5), rtol=1e-12, atol=1e-12)


def test_gradcheck_in_float64():
    key = DropoutKey(0.3, 1, 2, 3)
    assert torch.autograd.gradcheck(lambda *t: dropout_add_norm(*t, eps=1e-5, dropout=key, row_B=ROWS), inputs(4))


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_share_dropped_and_the_mean_kept(probability):
    scale = keep_scale(torch.Size((50, 20, 400)), torch.arange(50), DropoutKey(probability, 5, 6, 7))
    dropped = (scale == 0).double().mean().item()
    assert dropped == pytest.approx(probability, abs=5 * (probability * (1 - probability) / scale.numel()) ** 0.5)
    assert scale.max().item() == pytest.approx(1 / (1 - probability))


def test_a_row_drops_the_same_elements_in_any_batch_and_others_at_any_other_site_or_step():
    shape, key = torch.Size((3, 6, 8)), DropoutKey(0.5, 5, 6, 7)
    whole = keep_scale(shape, ROWS, key)
    assert torch.equal(keep_scale(torch.Size((1, 6, 8)), ROWS[1:2], key)[0], whole[1])
    for other in (key._replace(site=8), key._replace(step=7), key._replace(seed=6)):
        assert not torch.equal(keep_scale(shape, ROWS, other), whole)
