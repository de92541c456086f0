"""Attention by a bias and by blocks is the definition in float64, with its gradients."""

from __future__ import annotations

import pytest
import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.operation_types import LayerDropout, SpecialIds
from torch.nn.attention.flex_attention import create_block_mask

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model import plain_attention
from electra_dist.model.attention import BACKENDS, FlexMask, RowLayout, derive
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def packed_rows(rows: int, tokens: int) -> torch.Tensor:
    """Examples of 5 to 90 tokens, then pads; the last row is all pads."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    for row in ids[:-1]:
        at = 0
        while (length := int(torch.randint(5, 90, (), generator=generator))) <= tokens - at - 7:
            row[at : at + length] = torch.randint(5, 60, (length,), generator=generator)
            row[at], row[at + length - 1] = SPECIAL.cls, SPECIAL.sep
            at += length
    return ids


def definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    same = layout.example_BS[:, None, :, None] == layout.example_BS[:, None, None, :]
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~same, -torch.inf)
    return scores.softmax(-1) @ value


def attend(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: RowLayout,
    dropout: float = 0.0,
    keys: LayerDropout | None = None,
) -> torch.Tensor:
    """The output of a backend, [B, N, S, D]."""
    num_rows, num_heads, num_tokens, _ = query.shape
    keys = keys or LayerDropout(torch.zeros(3), torch.arange(num_rows), "reference")
    qkv = torch.stack([part.transpose(1, 2) for part in (query, key, value)], 2).view(num_rows * num_tokens, -1)
    mask = BACKENDS[backend].of_rows(layout, query.dtype, None)
    out_TH = mask.attend(qkv, num_heads, dropout, keys)
    return out_TH.view(num_rows, num_tokens, num_heads, -1).transpose(1, 2)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("tokens", [128, 200, 512])
def test_attention_is_the_definition(backend: str, tokens: int) -> None:
    layout = derive(packed_rows(3, tokens), SPECIAL)
    query, key, value = torch.randn(3, 3, 2, tokens, 16, dtype=torch.float64)
    out = attend(backend, query, key, value, layout)
    torch.testing.assert_close(out, definition(query, key, value, layout), rtol=1e-12, atol=1e-12)


def test_gradients_of_sdpa_are_those_of_the_definition() -> None:
    """FlexAttention has none on a CPU; on a GPU the trial at a run's start compares them with these."""
    layout = derive(packed_rows(3, 200), SPECIAL)
    query, key, value = (each.requires_grad_() for each in torch.randn(3, 3, 2, 200, 16, dtype=torch.float64))
    upstream = torch.randn(3, 2, 200, 16, dtype=torch.float64)
    out = attend("sdpa", query, key, value, layout)
    expected = definition(query, key, value, layout)
    ours, theirs = (torch.autograd.grad(each, (query, key, value), upstream) for each in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tokens", [37, 64, 128])
def test_short_bf16_rows_on_a_cpu_are_near_the_definition(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """The gradients are at least as near to float64 as those of torch's fused attention, the output to a rounding."""
    layout = derive(packed_rows(3, tokens), SPECIAL)
    inputs = [each.requires_grad_() for each in (2 * torch.randn(3, 3, 2, tokens, 64)).bfloat16()]
    upstream = torch.randn(3, 2, tokens, 64).bfloat16()
    exact = [each.detach().double().requires_grad_() for each in inputs]
    exact_out = definition(*exact, layout)
    expected = [exact_out, *torch.autograd.grad(exact_out, exact, upstream.double())]

    def errors() -> list[float]:
        out = attend("sdpa", *inputs, layout)
        results = [out, *torch.autograd.grad(out, inputs, upstream)]
        return [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(results, expected, strict=True)]

    monkeypatch.setattr(plain_attention, "HAS_BF16_PRODUCTS", False)
    fused = errors()
    monkeypatch.setattr(plain_attention, "HAS_BF16_PRODUCTS", True)
    plain = errors()
    assert plain != fused
    assert plain[0] < 2**-8, plain  # the distance of two neighbouring numbers in bf16
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(plain[1:], fused[1:], strict=True)), (plain, fused)


@pytest.mark.parametrize("tokens", [64, 37])
def test_dropout_on_a_cpu_is_the_definition_with_keyed_bits(tokens: int) -> None:
    layout, rows = derive(packed_rows(3, tokens), SPECIAL), torch.tensor([900, 5, 2**32 - 1])
    query, key, value = (each.requires_grad_() for each in torch.randn(3, 3, 2, tokens, 16, dtype=torch.float64))
    cells = 2 * tokens * tokens
    size = cells + -cells % 4
    keys = LayerDropout(torch.tensor([11, 4, 3]), rows, "reference")
    out = attend("sdpa", query, key, value, layout, 0.25, keys)
    first = 3 * size
    bits = bits_grid(11, Purpose.ATTENTION_DROPOUT, 4, rows, cells, first).view(3, 2, tokens, tokens)
    kept = bits >= 2**30
    assert 0.7 < kept.double().mean() < 0.8
    same = layout.example_BS[:, None, :, None] == layout.example_BS[:, None, None, :]
    scores = (query @ key.transpose(-1, -2) / 4).masked_fill(~same, -torch.inf)
    expected = (scores.softmax(-1) * kept / 0.75) @ value
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # 1 / 0.75 is an fp32 number
    ours, theirs = (torch.autograd.grad(each.square().sum(), (query, key, value)) for each in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_blocks_that_hold_no_two_tokens_of_one_example_are_left_out() -> None:
    ids = torch.full((1, 512), 7)
    ids[0, ::128] = SPECIAL.cls  # four examples of one block each
    blocks = FlexMask.of_rows(derive(ids, SPECIAL), torch.float32, None).blocks
    assert torch.equal(blocks.to_dense()[0, 0], torch.eye(4, dtype=torch.int32))
    assert blocks.sparsity() == 75.0


@pytest.mark.parametrize("reach", [None, 3, 64, 127, 128, 300])
@pytest.mark.parametrize("tokens", [60, 128, 640, 1100])
def test_blocks_are_those_that_torch_finds_in_a_mask_of_all_pairs(tokens: int, reach: int | None) -> None:
    ids = packed_rows(4, tokens)
    ids[0], ids[0, 0] = 7, SPECIAL.cls  # one example
    if tokens > 500:
        ids[1] = 7
        ids[1, [0, 250, 384]] = SPECIAL.cls
    layout = derive(ids, SPECIAL)
    example_BS = layout.example_BS

    def is_seen(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_near = (query - key).abs() <= (tokens if reach is None else reach)
        return is_near & (example_BS[row, query] == example_BS[row, key])

    expected = create_block_mask(is_seen, B=4, H=None, Q_LEN=tokens, KV_LEN=tokens, device="cpu")
    found = FlexMask.of_rows(layout, torch.float32, None, reach).blocks
    assert found.seq_lengths == expected.seq_lengths and found.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(found, f"{name}_num_blocks"), getattr(found, f"{name}_indices")
        assert torch.equal(counts, getattr(expected, f"{name}_num_blocks")), name
        assert torch.equal(indices, getattr(expected, f"{name}_indices")), name
        assert counts.dtype == indices.dtype == torch.int32


@torch.no_grad()
@pytest.mark.parametrize("name", ["rtd", "mlm", "all_tokens_mlm"])
def test_an_objective_has_the_same_loss_by_either(name: str) -> None:
    tower = {"num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    model = ModelConfig(
        vocab_size=64,
        embedding_size=16,
        max_positions=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        generator=TowerConfig(hidden_size=8, **tower),
        discriminator=TowerConfig(hidden_size=16, **tower),
    )
    ids, found = packed_rows(3, 128), {}
    for backend in ("sdpa", "flex"):
        module = build_objective(model, ObjectiveConfig(name=name), SPECIAL, seed=3).double()  # type: ignore[arg-type]
        module.attention = BACKENDS[backend]
        found[backend] = module(StepInput(ids, torch.arange(3), 0, 3, 1 / 30, 1 / 200))
    torch.testing.assert_close(found["flex"].loss, found["sdpa"].loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["flex"].rtd_logit_BS, found["sdpa"].rtd_logit_BS, rtol=1e-10, atol=1e-12)


def test_dropout_is_never_dropped_silently() -> None:
    """With `python -O` as well, which leaves assertions out."""
    layout = derive(packed_rows(2, 128), SPECIAL)
    query, key, value = torch.randn(3, 2, 2, 128, 16)
    with pytest.raises(ValueError, match="FlexAttention cannot drop"):
        attend("flex", query, key, value, layout, dropout=0.1)
