"""The architecture `modern` against Hugging Face's ModernBERT on the same weights, and against plain definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from electra_kernels.modern_layer import rotate_query_and_key, rotation_of
from support.modern_models import SPECIAL, hugging_face_twins, modern_model, our_logits, random_towers
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from electra_dist.config import ObjectiveConfig
from electra_dist.model import attention
from electra_dist.model.attention import BACKENDS, AttentionScopes, attend_in_windows, derive, new_attention_mask
from electra_dist.model.counts import parameter_counts, token_flops
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.modern_encoder import _drop
from electra_dist.model.towers import build_towers
from electra_dist.planning.activation_memory import activation_bytes_per_row

TOLERANCE = 1e-5
MakeRows = Callable[..., torch.Tensor]
SHAPES = [
    pytest.param({"width": 32, "heads": 2, "layers": 4, "generator_layers": 2}, id="two-global-layers"),
    pytest.param({"width": 48, "heads": 6, "layers": 3, "generator_layers": 1, "local_window": 17}, id="odd-window"),
    pytest.param({"width": 64, "heads": 1, "layers": 5, "global_every": 2, "global_rope_theta": 1e4}, id="one-head"),
    pytest.param({"width": 32, "heads": 4, "layers": 2, "global_every": 1, "sharing": "none"}, id="all-global"),
    pytest.param({"width": 32, "heads": 2, "layers": 7, "local_window": 128, "sharing": "gdes"}, id="wide-window"),
]


def mask_of(towers: Any, ids: torch.Tensor, backend: str = "sdpa") -> AttentionScopes:
    """Attention masks of the global and of the local layers, which a test can change."""
    mask = new_attention_mask(towers.model, derive(ids, SPECIAL), torch.float32, BACKENDS[backend])
    assert isinstance(mask, AttentionScopes)
    return mask


def biases_of(towers: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The biases of the global and of the local layers."""
    masks: Any = mask_of(towers, ids)
    return masks.global_mask.bias_B1SS, masks.local_mask.bias_B1SS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seq_len", [60, 300])
def test_logits_of_packed_and_padded_rows_are_those_of_hugging_face(
    shape: dict[str, Any], seq_len: int, make_rows: MakeRows
) -> None:
    towers = random_towers(modern_model(**shape))
    generator, discriminator = hugging_face_twins(towers)
    part = seq_len // 5
    ids = make_rows([[(seq_len - 2, 0)], [(part, part)], [(part, 3), (9, 0), (part, part)]], seq_len=seq_len)
    layout = derive(ids, SPECIAL)
    global_bias, local_bias = biases_of(towers, ids)
    ours = our_logits(towers, ids)

    inputs = {
        "input_ids": ids,
        "position_ids": layout.position_BS,
        "attention_mask": {"full_attention": global_bias, "sliding_attention": local_bias},
    }
    with torch.no_grad():
        their_tokens = generator(**inputs).logits
        their_replaced = discriminator(**inputs).logits.squeeze(-1)

    real = layout.is_real_BS
    assert (ours.tokens - their_tokens)[real].abs().max() <= TOLERANCE
    assert (ours.replaced - their_replaced)[real].abs().max() <= TOLERANCE
    assert ours.tokens.isfinite().all() and ours.replaced.isfinite().all()
    assert their_replaced[real].std() > 0.05  # the comparison is not one of zeros


def test_one_example_a_row_equals_hugging_face_called_as_users_do(make_rows: MakeRows) -> None:
    """Hugging Face receives only the padding mask of a tokenizer, and makes its own windows and positions."""
    towers = random_towers(modern_model(layers=4))
    _, discriminator = hugging_face_twins(towers)
    ids = make_rows([[(50, 47)], [(70, 0)], [(3, 2)]], seq_len=100)
    real = derive(ids, SPECIAL).is_real_BS

    with torch.no_grad():
        theirs = discriminator(input_ids=ids, attention_mask=real.long()).logits.squeeze(-1)

    assert (our_logits(towers, ids).replaced - theirs)[real].abs().max() <= TOLERANCE


@pytest.mark.parametrize(("num_tokens", "num_by_blocks"), [(511, 0), (600, 2)])
def test_only_long_rows_are_computed_by_blocks_and_all_have_the_logits_of_hugging_face(
    num_tokens: int, num_by_blocks: int, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = random_towers(modern_model(layers=4, generator_layers=1, max_positions=600, local_window=32))
    _, discriminator = hugging_face_twins(towers)
    ids = make_rows([[(300, 150)], [(num_tokens - 2, 0)]], seq_len=num_tokens)
    real = derive(ids, SPECIAL).is_real_BS
    with torch.no_grad():
        theirs = discriminator(input_ids=ids, attention_mask=real.long()).logits.squeeze(-1)
    by_blocks = Mock(wraps=attend_in_windows)
    monkeypatch.setattr(attention, "attend_in_windows", by_blocks)

    ours = our_logits(towers, ids).replaced

    assert (ours - theirs)[real].abs().max() <= TOLERANCE
    assert by_blocks.call_count == num_by_blocks  # two of the four layers are local


@pytest.mark.drill  # attention of Hugging Face to 8,192 tokens takes gigabytes
def test_a_row_of_8192_tokens_has_the_logits_of_hugging_face(make_rows: MakeRows) -> None:
    towers = random_towers(modern_model(layers=4, max_positions=8192, local_window=128))
    _, discriminator = hugging_face_twins(towers)
    ids = make_rows([[(5000, 3189)]], seq_len=8192)

    with torch.no_grad():
        theirs = discriminator(input_ids=ids).logits.squeeze(-1)

    assert (our_logits(towers, ids).replaced - theirs).abs().max() <= TOLERANCE


def test_a_packed_example_has_the_logits_of_the_example_alone(make_rows: MakeRows) -> None:
    towers = random_towers(modern_model())
    packed = make_rows([[(25, 26), (9, 0), (30, 8)]], seq_len=120)
    together = our_logits(towers, packed)
    starts = (packed[0] == SPECIAL.cls).nonzero().flatten().tolist()
    ends = [*starts[1:], int((packed[0] != SPECIAL.pad).sum())]

    assert len(starts) == 3
    for start, end in zip(starts, ends, strict=True):
        alone = our_logits(towers, packed[:, start:end])
        assert (alone.replaced - together.replaced[:, start:end]).abs().max() <= 5e-6
        assert (alone.tokens - together.tokens[:, start:end]).abs().max() <= 1e-5


def test_masks_let_a_token_see_its_example_and_in_local_layers_half_a_window_to_each_side(make_rows: MakeRows) -> None:
    towers = random_towers(modern_model(local_window=6))
    ids = make_rows([[(9, 4), (7, 0)], [(5, 0)]], seq_len=28)
    example = derive(ids, SPECIAL).example_BS
    global_bias, local_bias = biases_of(towers, ids)

    for row in range(2):
        for query in range(28):
            for key in range(28):
                same = bool(example[row, query] == example[row, key])
                near = abs(query - key) <= 3
                assert (global_bias[row, 0, query, key] == 0) == same
                assert (local_bias[row, 0, query, key] == 0) == (same and near)


def test_blocks_of_flex_attention_are_the_same_windows(make_rows: MakeRows) -> None:
    towers = random_towers(modern_model(local_window=20))
    ids = make_rows([[(80, 70), (60, 0)], [(200, 40)]], seq_len=256)
    query, key, value = torch.randn(3, 2, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    _, bias = biases_of(towers, ids)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    mask: Any = mask_of(towers, ids, "flex").local_mask
    found = flex_attention(query, key, value, block_mask=mask.blocks)

    assert (found - expected).abs().max() <= 2e-6


@pytest.mark.parametrize("num_tokens", [33, 64, 71])
def test_attention_by_blocks_has_the_values_and_gradients_of_attention_with_the_whole_bias(
    num_tokens: int, make_rows: MakeRows
) -> None:
    towers = random_towers(modern_model(local_window=16))
    bias = biases_of(towers, make_rows([[(12, 8)], [(num_tokens - 2, 0)]], seq_len=num_tokens))[1].double()
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, 2, num_tokens, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(3)
    ]
    upstream = torch.randn(2, 2, num_tokens, 4, dtype=torch.float64, generator=generator)
    whole = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=bias)
    expected = torch.autograd.grad(whole, leaves, upstream)

    found = attend_in_windows(*leaves, bias, reach=8)

    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-13)
    for gradient, expected_gradient in zip(torch.autograd.grad(found, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


def test_rotated_scores_depend_on_the_distance_of_the_positions_alone() -> None:
    qkv = torch.randn(1, 1, 3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotations = [rotation_of(torch.tensor([[at]]), 8, 10000.0) for at in (query_position, key_position)]
        query = rotate_query_and_key(qkv, rotations[0])[:, :, 0]
        key = rotate_query_and_key(qkv, rotations[1])[:, :, 1]
        return (query * key).sum(-1)

    torch.testing.assert_close(score(3, 10), score(40, 47), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(score(5, 5), (qkv[:, :, 0] * qkv[:, :, 1]).sum(-1), rtol=1e-6, atol=1e-6)
    assert (score(3, 10) - score(3, 11)).abs().max() > 1e-3


def test_dropout_of_a_row_follows_from_its_keys_and_differs_between_sub_layers_and_rows(make_rows: MakeRows) -> None:
    model = modern_model(hidden_dropout=0.3, attention_dropout=0.2)
    towers = random_towers(model).train()
    ids = make_rows([[(20, 8)], [(5, 3), (9, 0)], [(20, 8)]], seq_len=31)
    ids[2] = ids[0]

    def states(rows: list[int], step: int = 4) -> torch.Tensor:
        layout = derive(ids[rows], SPECIAL)
        keys = DropoutKeys(seed=9, step=step, row_B=torch.tensor(rows) + 100, backend="auto")
        mask = new_attention_mask(model, layout, torch.float32)
        return towers.discriminator(towers.embeddings(ids[rows], layout, keys), mask, keys)

    together = states([0, 1, 2])
    alone = torch.cat([states([row]) for row in range(3)])
    assert (together - alone).abs().max() <= 1e-5
    assert (together[0] - together[2]).abs().max() > 0.1  # equal rows with different numbers
    assert (together - states([0, 1, 2], step=5)).abs().max() > 0.1

    row_B = torch.tensor([3])
    keys = DropoutKeys(seed=9, step=4, row_B=row_B, backend="auto")
    (_, layer_keys), *_ = towers.discriminator.layer_inputs(mask_of(towers, ids[:1]), keys)
    ones = torch.ones(400, 32)
    dropped = [_drop(ones, each) for each in (layer_keys.attention_output, layer_keys.feed_forward_output)]
    assert not torch.equal(dropped[0], dropped[1])
    for output in dropped:
        assert (output == 0).float().mean() == pytest.approx(0.3, abs=0.02)
        assert output.mean() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(("generator_width", "sharing"), [(32, "embeddings"), (16, "embeddings"), (32, "none")])
def test_parameter_counts_are_those_of_the_built_towers_and_of_hugging_faces_module(
    generator_width: int, sharing: str
) -> None:
    generator = {"hidden_size": generator_width, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
    model = modern_model(generator=generator, sharing=sharing)
    towers = random_towers(model)
    counts = parameter_counts(model)
    pad_rows = (model.padded_vocab_size - model.vocab_size) * model.embedding_size
    num_tables = 2 if sharing == "none" else 1

    assert counts.total == sum(parameter.numel() for parameter in towers.parameters()) - num_tables * pad_rows
    if generator_width == 32:
        _, discriminator = hugging_face_twins(towers)
        assert counts.discriminator == discriminator.num_parameters()


def test_flops_are_those_of_torchs_counter_and_local_layers_cost_no_more_in_longer_rows() -> None:
    model = modern_model(layers=4, local_window=128)
    generator, discriminator = hugging_face_twins(random_towers(model))
    ids = torch.full((2, 60), 7)  # shorter than half a window, so that the counter's whole rows are the windows
    objective = ObjectiveConfig()
    flops = token_flops(model, 60, objective)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        discriminator(ids)
    assert 3 * counter.get_total_flops() == flops.discriminator * 120

    all_tokens = ObjectiveConfig(name="all_tokens_mlm")
    copy_gate = 3 * 2 * 32
    narrow = modern_model(layers=2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        generator(ids[:, :8])  # 8 tokens are in a window of 16 tokens, too
    assert 3 * counter.get_total_flops() == (token_flops(narrow, 8, all_tokens).discriminator - copy_gate) * 16

    # From 1,000 to 2,000 tokens only the two global ones of four layers attend to more.
    longer = token_flops(model, 2000, objective).discriminator - token_flops(model, 1000, objective).discriminator
    assert longer == 3 * 2 * (4 * 1000 * 32)


def test_tokens_that_are_attended_to_are_added_up_over_the_layers_however_many_they_are() -> None:
    model = modern_model(local_window=8)
    counted = sum(40 if layer % model.global_every == 0 else 9 for layer in range(10))
    assert model.visible_keys(10, 40) == counted
    assert model.visible_keys(10**15, 40) > 9 * 10**15


def test_initial_weights_of_products_into_the_residual_stream_are_smaller_in_deeper_towers() -> None:
    model = modern_model(width=64, layers=8)
    parameters = dict(build_towers(model, seed=3).named_parameters())
    inner = parameters["discriminator.layers.5.gated_expand.weight"].std().item()

    for name in ("attention.out", "contract"):
        outer = parameters[f"discriminator.layers.5.{name}.weight"].std().item()
        assert outer == pytest.approx(inner / 4, rel=0.1)  # sqrt(2 x 8 layers)
    assert (parameters["discriminator.final_norm.weight"] == 1).all()
    assert not any(name.endswith("norm.bias") or "qkv.bias" in name for name in parameters)


def test_the_plan_counts_the_activations_that_a_layer_keeps(make_rows: MakeRows) -> None:
    """The rows are short; in long ones, local attention on a CPU also keeps the output of each block.

    A CPU keeps the result of GELU as well, which the kernel of a GPU, for which the plan is, does not.
    """
    width, inner = 64, 96
    ids = make_rows([[(100, 0)], [(50, 30)]], seq_len=110)

    def kept_bytes(layers: int) -> int:
        towers = random_towers(
            modern_model(width=width, heads=4, layers=layers, generator_layers=1, local_window=64)
        ).train()
        masks: Any = mask_of(towers, ids)
        constants = [*towers.parameters(), masks.global_mask.bias_B1SS, masks.local_mask.bias_B1SS]
        left_out = {tensor.untyped_storage().data_ptr() for tensor in constants}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        embedded = torch.randn(*ids.shape, width, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            towers.discriminator(embedded, masks, DropoutKeys.off(ids))
        return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in left_out)

    of_four_layers = (kept_bytes(7) - kept_bytes(3)) / ids.numel() / 4
    statistics = 4 * (4 + 2 * 2)  # log-sum-exp of each head, mean and variance of two LayerNorms
    assert of_four_layers == 4 * (8 * width + 4 * inner) + statistics
    model = modern_model(width=width, heads=4, layers=7, generator_layers=1)
    shorter = modern_model(width=width, heads=4, layers=3, generator_layers=1)
    objective = ObjectiveConfig(generator="uniform")
    planned = [activation_bytes_per_row(of, objective, 110, precision="fp32") for of in (model, shorter)]
    assert (planned[0] - planned[1]) / 110 == 4 * (of_four_layers - 4 * inner)
