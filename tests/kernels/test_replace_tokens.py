"""Replacing and labelling in plain PyTorch against a case worked out by hand."""

import torch
from electra_kernels.slots import replace_and_label


def test_used_slots_replace_their_tokens_and_only_tokens_that_differ_are_labelled():
    """In row 0 one sample equals the original, and in row 1 two samples of one position give the floor of their mean,
    31. Slots of weight 0 write nothing, and the order of the slots makes no difference.
    """
    ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    positions = torch.tensor([[1, 2, 0], [0, 3, 3]])
    weight = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    sampled = torch.tensor([[11, 99, 77], [66, 30, 33]])
    shuffled = [2, 0, 1]

    corrupted, label = replace_and_label(ids, positions, weight, sampled.flatten())
    corrupted_by_shuffled, _ = replace_and_label(
        ids, positions[:, shuffled], weight[:, shuffled], sampled[:, shuffled]
    )

    assert corrupted.tolist() == [[10, 11, 99, 13], [20, 21, 22, 31]]
    assert label.tolist() == [[False, False, True, False], [False, False, False, True]]
    assert label.dtype == torch.bool
    assert torch.equal(corrupted_by_shuffled, corrupted)
