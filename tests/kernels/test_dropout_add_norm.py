"""Dropout + add + LayerNorm: plain torch without dropout, the right share dropped, the same elements for any split."""

import pytest
import torch
import torch.nn.functional as F
from electra_kernels.layer_passes import dropout_add_norm, keep_scale
from electra_kernels.operation_types import LayerDropout

ROWS = torch.tensor([7, 2**32 - 1, 0])  # numbers of the rows within the global batch
KEY = torch.tensor([1, 2, 1])  # seed, step, layer


def inputs(hidden: int = 12) -> list[torch.Tensor]:
    """Random output of a sub-layer, its input, and weight and bias of the LayerNorm, for 3 rows of 5 tokens."""
    shapes = [(3, 5, hidden), (3, 5, hidden), (hidden,), (hidden,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_at_dropout_probability_0_the_output_is_torchs_layer_norm_of_the_sum():
    hidden, eps = 12, 1e-5
    x, residual, weight, bias = inputs(hidden)

    out, _ = dropout_add_norm(x, residual, weight, bias, ROWS, KEY, 1, 0.0, eps, "auto")

    expected = F.layer_norm(x + residual, (hidden,), weight, bias, eps)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_gradients_with_dropout_pass_gradcheck_in_float64():
    def output(*tensors: torch.Tensor) -> torch.Tensor:
        return dropout_add_norm(*tensors, ROWS, KEY, 1, 0.3, 1e-5, "auto")[0]

    assert torch.autograd.gradcheck(output, inputs(4))


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_dropout_probability_is_the_share_dropped_and_sets_the_factor_of_the_others(probability):
    """The share may differ by five standard deviations of a binomial share."""
    dropout = LayerDropout(torch.tensor([5, 6, 3]), torch.arange(50), "reference", probability, site=1)

    scale = keep_scale(torch.Size((50, 20, 400)), dropout)

    dropped_share = (scale == 0).double().mean().item()
    deviation = (probability * (1 - probability) / scale.numel()) ** 0.5
    assert dropped_share == pytest.approx(probability, abs=5 * deviation)
    assert scale.max().item() == pytest.approx(1 / (1 - probability))


def test_a_row_drops_the_same_elements_in_any_batch_and_other_elements_at_another_site_step_or_seed():
    shape = torch.Size((3, 6, 8))
    shape_of_one_row = torch.Size((1, 6, 8))
    dropout = LayerDropout(torch.tensor([5, 6, 3]), ROWS, "reference", 0.5, site=1)

    whole = keep_scale(shape, dropout)
    second_row_alone = keep_scale(shape_of_one_row, dropout._replace(row_B=ROWS[1:2]))

    assert torch.equal(second_row_alone[0], whole[1])
    assert not torch.equal(keep_scale(shape, dropout._replace(site=0)), whole)
    for other_key in ([6, 6, 3], [5, 7, 3], [5, 6, 4]):
        assert not torch.equal(keep_scale(shape, dropout._replace(key_3=torch.tensor(other_key))), whole)
