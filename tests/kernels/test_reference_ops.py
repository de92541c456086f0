"""The plain-PyTorch definitions against arithmetic written independently in float64 NumPy and loops."""

import numpy as np
import torch
from electra_kernels.masked_gather import gather_masked
from electra_kernels.replace import replace_and_label


def test_gather_adds_the_gradients_of_slots_that_share_a_position():
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 0, 0], [4, 1, 4], [2, 3, 0]])
    rows = gather_masked(hidden, positions)
    assert rows.shape == (9, 4)
    for b in range(3):
        for n in range(3):
            assert torch.equal(rows[b * 3 + n], hidden[b, positions[b, n]])
    upstream = torch.randn_like(rows)
    rows.backward(upstream)
    expected = np.zeros((3, 5, 4))
    for b in range(3):
        for n in range(3):
            expected[b, positions[b, n]] += upstream[b * 3 + n].numpy()
    np.testing.assert_allclose(hidden.grad.numpy(), expected, atol=1e-15)
    assert torch.autograd.gradcheck(lambda h: gather_masked(h, positions), hidden)


def test_replace_writes_live_slots_only_and_labels_by_difference():
    ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    positions = torch.tensor([[1, 2, 0], [0, 3, 3]])
    weight = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    sampled = torch.tensor([[11, 99, 77], [66, 30, 33]])
    corrupted, label = replace_and_label(ids, positions, weight, sampled.flatten())
    # Two slots on one position: the floor of the mean, 31.
    assert corrupted.tolist() == [[10, 11, 99, 13], [20, 21, 22, 31]]
    assert label.tolist() == [[False, False, True, False], [False, False, False, True]]
    assert label.dtype == torch.bool
    shuffled = [2, 0, 1]
    again, _ = replace_and_label(ids, positions[:, shuffled], weight[:, shuffled], sampled[:, shuffled])
    assert torch.equal(again, corrupted)
