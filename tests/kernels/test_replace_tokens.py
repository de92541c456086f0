"""Replacing and labelling in plain PyTorch against a case worked out by hand."""

import torch
from electra_kernels.replace_tokens import replace_and_label


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
