"""The kernel that draws masked positions, in Triton's interpreter: every integer is the reference's."""

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import mask_positions
from hypothesis import given, settings
from hypothesis import strategies as st

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SEED = 2**62 + 2**33 + 9


def packed_rows(lengths, seq_len):
    """Rows of several examples each, [CLS] text [SEP], of the given total lengths, then pads."""
    ids = torch.zeros(len(lengths), seq_len, dtype=torch.int64)
    for row, length in zip(ids, lengths):
        row[:length] = torch.randint(5, 300, (length,))
        row[:length:17] = SPECIAL.cls
        row[16:length:17] = SPECIAL.sep
        row[5:length:40] = SPECIAL.mask  # a [MASK] in the text is no candidate
    return ids


@pytest.mark.parametrize(
    ("seq_len", "num_slots", "lengths", "mask_token_prob"),
    [
        (512, 130, [511], 0.85),
        (128, 19, [128, 127, 65], 0.85),
        (70, 70, [70, 33, 3, 0], 0.0),  # neither a multiple of a block nor of 4 random words; a slot for every token
        (70, 20, [64, 65], 1.0),
        (1, 1, [1, 0], 0.85),
    ],
)
def test_masked_positions_are_the_references(seq_len, num_slots, lengths, mask_token_prob):
    ids = packed_rows(lengths, seq_len)
    rows = torch.arange(len(lengths)) + 2**32 - len(lengths)
    wanted = (torch.arange(seq_len + 1) // 4).clamp(1, num_slots)
    options = {"num_slots": num_slots, "mask_token_prob": mask_token_prob, "seed": SEED, "step": 2**32 - 1}
    expected = mask_positions(ids, rows, wanted, SPECIAL, **options, backend="reference")
    by_kernel = mask_positions(ids, rows, wanted, SPECIAL, **options, backend="triton")
    for tensor, expected_tensor in zip(by_kernel, expected):
        assert tensor.dtype == expected_tensor.dtype
        assert torch.equal(tensor, expected_tensor)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    num_slots=st.integers(1, 40),
    step=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
@settings(max_examples=10, deadline=None)
def test_masked_positions_are_the_references_for_any_rows(lengths, num_slots, step, seed, data):
    """For rows of any ids from 1 to 9, special ones among them, any number of slots, and any key."""
    ids = torch.zeros(len(lengths), 40, dtype=torch.int64)
    for row, length in zip(ids, lengths):
        row[:length] = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=length, max_size=length)))
    rows = torch.arange(len(lengths))
    wanted = torch.arange(41).clamp(1, num_slots)
    options = {"num_slots": num_slots, "mask_token_prob": 0.5, "seed": seed, "step": step}
    expected = mask_positions(ids, rows, wanted, SPECIAL, **options, backend="reference")
    by_kernel = mask_positions(ids, rows, wanted, SPECIAL, **options, backend="triton")
    for tensor, expected_tensor in zip(by_kernel, expected):
        assert torch.equal(tensor, expected_tensor)


def test_equal_random_words_are_ordered_by_position(monkeypatch):
    """Both give the earlier slot to the lower position; words are equal once in 2**32, so they are made so."""
    from electra_kernels import slots as reference
    from electra_kernels.triton import slots as kernels

    def coarse(bits):
        """Random words of which only two bits are left."""
        return bits >> 30

    four_way_bits = kernels.four_way_bits.fn
    bits_grid = reference.bits_grid
    monkeypatch.setattr(reference, "bits_grid", lambda *arguments: coarse(bits_grid(*arguments)))
    ids = packed_rows([128, 70], 128)
    wanted = (torch.arange(129) // 2).clamp(1, 60)
    arguments = {"num_slots": 60, "mask_token_prob": 1.0, "seed": SEED, "step": 3}
    expected = mask_positions(ids, torch.arange(2), wanted, SPECIAL, **arguments, backend="reference")
    monkeypatch.setitem(
        kernels.mask_kernel.fn.__globals__, "four_way_bits", lambda *a, **k: coarse(four_way_bits(*a, **k))
    )
    by_kernel = mask_positions(ids, torch.arange(2), wanted, SPECIAL, **arguments, backend="triton")
    for tensor, expected_tensor in zip(by_kernel, expected):
        assert torch.equal(tensor, expected_tensor)
