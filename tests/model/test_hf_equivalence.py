"""Both towers against Hugging Face's on the same weights: the independent truth for the architecture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import SIZES

from electra_dist.model.attention import SdpaMask, attention_bias, derive
from electra_dist.model.encoder import DropoutKeys

TOLERANCE = 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_logits_equal(
    size: tuple[int, int, int, int],
    make_config: Callable[..., Any],
    make_towers: Callable[..., Any],
    hf_twins: Callable[..., Any],
    make_rows: Callable[..., torch.Tensor],
    special: Any,
) -> None:
    model = make_config(*size)
    towers = make_towers(model)
    generator, discriminator = hf_twins(towers, model)
    # Full, padded, single segment, and packed with several examples.
    ids = make_rows([[(20, 25)], [(6, 4)], [(12, 0)], [(5, 6), (9, 0), (3, 8)]], seq_len=48)
    layout = derive(ids, special)
    bias = attention_bias(layout, torch.float32)
    inputs = {
        "input_ids": ids,
        "token_type_ids": layout.token_type_BS,
        "position_ids": layout.position_BS,
        "attention_mask": bias,  # four-dimensional: taken as it is
    }
    assert layout.token_type_BS.any()
    assert not layout.is_real_BS.all()
    with torch.no_grad():
        hidden = towers.generator(towers.embeddings(ids, layout), SdpaMask(bias), DropoutKeys.off(ids))
        table = towers.embeddings.word.weight[: model.vocab_size]
        ours_mlm = towers.generator_head.transform(hidden) @ table.T + towers.generator_head.bias
        hidden = towers.discriminator(towers.embeddings(ids, layout), SdpaMask(bias), DropoutKeys.off(ids))
        ours_rtd = towers.discriminator_head(hidden, ids > 99, layout.is_real_BS, backend="reference").logits_T
        theirs_mlm = generator(**inputs).logits
        theirs_rtd = discriminator(**inputs).logits
    real = layout.is_real_BS
    assert (ours_mlm - theirs_mlm)[real].abs().max() <= TOLERANCE
    assert (ours_rtd.view_as(ids) - theirs_rtd)[real].abs().max() <= TOLERANCE
    assert ours_mlm.isfinite().all()
    assert ours_rtd.isfinite().all()
    assert theirs_rtd[real].std() > 0.05  # the comparison is not one of zeros


def test_one_example_a_row_equals_hugging_face_called_as_users_do(
    make_config: Callable[..., Any],
    make_towers: Callable[..., Any],
    hf_twins: Callable[..., Any],
    make_rows: Callable[..., torch.Tensor],
    special: Any,
) -> None:
    """With the usual two-dimensional padding mask and default positions."""
    model = make_config(32, 64, 16)
    towers = make_towers(model)
    _, discriminator = hf_twins(towers, model)
    ids = make_rows([[(10, 7)], [(19, 0)], [(3, 2)]], seq_len=21)
    layout = derive(ids, special)
    with torch.no_grad():
        hidden = towers.discriminator(
            towers.embeddings(ids, layout), SdpaMask(attention_bias(layout, torch.float32)), DropoutKeys.off(ids)
        )
        ours = towers.discriminator_head(hidden, ids > 99, layout.is_real_BS, backend="reference").logits_T
        theirs = discriminator(
            input_ids=ids, token_type_ids=layout.token_type_BS, attention_mask=layout.is_real_BS.long()
        ).logits
    assert (ours.view_as(ids) - theirs)[layout.is_real_BS].abs().max() <= TOLERANCE


def test_packed_example_equals_the_example_alone(
    make_config: Callable[..., Any],
    make_towers: Callable[..., Any],
    make_rows: Callable[..., torch.Tensor],
    special: Any,
) -> None:
    model = make_config(32, 64, 16)
    towers = make_towers(model)
    packed = make_rows([[(5, 6), (9, 0), (3, 8)]], seq_len=44)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        layout = derive(ids, special)
        hidden = towers.discriminator(
            towers.embeddings(ids, layout), SdpaMask(attention_bias(layout, torch.float32)), DropoutKeys.off(ids)
        )
        return towers.discriminator_head(hidden, ids > 99, layout.is_real_BS, backend="reference").logits_T

    with torch.no_grad():
        together = logits(packed)
        starts = (packed[0] == special.cls).nonzero().flatten().tolist()
        ends = [*starts[1:], int((packed[0] != special.pad).sum())]
        assert len(starts) == 3
        for start, end in zip(starts, ends, strict=True):
            alone = logits(packed[:, start:end])
            assert (alone - together[start:end]).abs().max() <= 2e-6
