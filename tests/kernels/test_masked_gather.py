"""Gathering the states of masked positions in plain PyTorch, against loops in float64."""

import numpy as np
import torch
from electra_kernels.slots import gather_masked


def test_gather_reads_each_slots_position_and_adds_the_gradients_of_slots_that_share_one():
    """Three rows with three slots each; slots of rows 0 and 1 share positions."""
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 0, 0], [4, 1, 4], [2, 3, 0]])
    num_rows, num_slots = positions.shape

    rows = gather_masked(hidden, positions)
    upstream = torch.randn_like(rows)
    rows.backward(upstream)

    assert rows.shape == (9, 4)
    expected_gradient = np.zeros((3, 5, 4))
    for b in range(num_rows):
        for n in range(num_slots):
            slot = b * num_slots + n
            position = positions[b, n]
            assert torch.equal(rows[slot], hidden[b, position])
            expected_gradient[b, position] += upstream[slot].numpy()
    np.testing.assert_allclose(hidden.grad.numpy(), expected_gradient, atol=1e-15)
    assert torch.autograd.gradcheck(lambda h: gather_masked(h, positions), hidden)
