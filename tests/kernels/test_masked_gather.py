"""Gathering masked positions in plain PyTorch against float64 NumPy and loops."""

import numpy as np
import torch
from electra_kernels.masked_gather import gather_masked


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
