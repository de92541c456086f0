"""What `gpu.py` measures: each fused operation beside what one would use without it, as functions of no arguments.

A case is a name, our call, its rivals, and the tensors whose gradients are compared with float64. Rivals that are not
installed are left out, and the table says so. Every head draws a sample: a rival without a sampler gets the one its
users have, another pass over the logits.

Shapes: M masked rows, D features, V padded vocabulary, B rows, S tokens, T = B * S, H hidden, N slots.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import rtd_loss
from electra_kernels.dropout_add_norm import dropout_add_norm
from electra_kernels.masked_gather import gather_masked
from electra_kernels.mlm_head import mlm_head_loss_and_sample
from electra_kernels.op_types import DropoutKey
from electra_kernels.replace import replace_and_label


class Sizes(NamedTuple):
    """How large everything is: the large model on one GPU, or a toy for the smoke run."""

    masked: tuple[int, ...]  # rows of the head
    embedding: int
    vocab: int
    padded: int
    batch: int
    seq_len: int
    slots: int
    widths: tuple[int, ...]  # of the two towers
    exact_rows: int  # of the comparison with float64


LARGE = Sizes((8192, 16384), 1024, 30522, 30592, 64, 512, 128, (256, 1024), 512)
TOY = Sizes((24,), 16, 300, 384, 2, 16, 4, (8, 16), 12)


class Head(NamedTuple):
    """Inputs of the generator's head."""

    x_MD: torch.Tensor
    table_VD: torch.Tensor
    bias_V: torch.Tensor
    target_M: torch.Tensor
    weight_M: torch.Tensor

    def differentiable(self) -> list[torch.Tensor]:
        """The tensors that get a gradient."""
        return [self.x_MD, self.table_VD, self.bias_V]


def head_inputs(sizes: Sizes, num_rows: int, device: str, dtype: torch.dtype) -> Head:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    return Head(
        x_MD=normal(num_rows, sizes.embedding).requires_grad_(),
        table_VD=(normal(sizes.padded, sizes.embedding) * sizes.embedding**-0.5).requires_grad_(),
        bias_V=normal(sizes.vocab).requires_grad_(),
        target_M=torch.randint(sizes.vocab, (num_rows,), device=device),
        weight_M=torch.ones(num_rows, device=device),
    )


def our_head(given: Head, vocab: int, backend: str, chunk: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and sample."""
    row_M = torch.arange(len(given.x_MD), device=given.x_MD.device)
    out = mlm_head_loss_and_sample(*given, seed=1, step=2, row_M=row_M, vocab_size=vocab, chunk=chunk, backend=backend)
    return out.loss_sum, out.sampled_M


def eager_head(given: Head, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, fp32 cross-entropy, Gumbel-max: what one writes first."""
    logits_MV = (F.linear(given.x_MD, given.table_VD[:vocab]) + given.bias_V).float()
    loss_M = F.cross_entropy(logits_MV, given.target_M, reduction="none")
    return (loss_M * given.weight_M).sum(), _gumbel_max(logits_MV.detach())


def _gumbel_max(logits_MV: torch.Tensor) -> torch.Tensor:
    uniform_MV = torch.rand_like(logits_MV).clamp_(1e-9, 1 - 6e-8)
    return (logits_MV - torch.log(-torch.log(uniform_MV))).argmax(1)


@torch.no_grad()
def separate_sample(given: Head, vocab: int) -> torch.Tensor:
    """What a fused cross-entropy without a sampler needs besides: the logits again, in chunks."""
    chunks = given.x_MD.split(4096)
    return torch.cat([_gumbel_max(F.linear(x, given.table_VD[:vocab], given.bias_V).float()) for x in chunks])


def rival_heads(vocab: int, with_compile: bool) -> dict[str, Callable[[Head], tuple[torch.Tensor, torch.Tensor]]]:
    """The heads one could use instead, by name; only those that are installed here."""
    rivals: dict[str, Callable[[Head], Any]] = {"eager": lambda given: eager_head(given, vocab)}
    if with_compile:
        # One compilation for each number of rows: shapes are static in training.
        compiled = torch.compile(lambda *tensors: eager_head(Head(*tensors), vocab), dynamic=False)
        rivals["torch.compile"] = lambda given: compiled(*given)
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        rivals["Liger + sampler"] = lambda given: (
            liger(given.table_VD[:vocab], given.x_MD, given.target_M, given.bias_V),
            separate_sample(given, vocab),
        )
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        rivals["CCE + sampler"] = lambda given: (
            linear_cross_entropy(
                given.x_MD, given.table_VD[:vocab], given.target_M, bias=given.bias_V, reduction="sum"
            ),
            separate_sample(given, vocab),
        )
    return rivals


class GpuCase(NamedTuple):
    """An operation but the head: `ours(backend)` and `eager()` return what is differentiated, or None."""

    name: str
    ours: Callable[[list[torch.Tensor], str], torch.Tensor]
    eager: Callable[[list[torch.Tensor]], torch.Tensor]
    inputs: list[torch.Tensor]
    num_bytes: int  # least traffic forward and backward


def cases(sizes: Sizes, device: str, dtype: torch.dtype) -> list[GpuCase]:
    """Gather, replace, tail and both norms at the model's sizes."""
    B, S, N = sizes.batch, sizes.seq_len, sizes.slots
    size = torch.finfo(dtype).bits // 8
    narrow, wide = sizes.widths

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    positions = torch.rand(B, S, device=device).argsort(1)[:, :N]
    flat = (positions + torch.arange(B, device=device)[:, None] * S).flatten()
    rows = torch.arange(B, device=device)
    label, mask = torch.rand(B * S, device=device) > 0.85, torch.rand(B * S, device=device) > 0.02
    ids = torch.randint(sizes.vocab, (B, S), device=device)
    weight = (torch.rand(B, N, device=device) > 0.1).float()
    sampled = torch.randint(sizes.vocab, (B * N,), device=device)

    def eager_tail(given: list[torch.Tensor]) -> torch.Tensor:
        dense, bias, out_weight, out_bias = given
        logits = (F.gelu(dense + bias) @ out_weight + out_bias).float()
        loss = F.binary_cross_entropy_with_logits(logits, label.float(), reduction="none")
        return (loss * mask).sum()

    def eager_replace(_: list[torch.Tensor]) -> torch.Tensor:
        corrupted = ids.scatter(1, positions, torch.where(weight > 0, sampled.view(B, N), ids.gather(1, positions)))
        return (corrupted != ids).sum()

    found = [
        GpuCase(
            "masked gather",
            lambda given, backend: gather_masked(given[0], positions, backend=backend),
            lambda given: given[0].flatten(0, 1)[flat],
            [normal(B, S, narrow)],
            size * narrow * (3 * B * N + B * S),
        ),
        GpuCase(
            "replace + label",
            lambda _, backend: replace_and_label(ids, positions, weight, sampled, backend=backend)[1].sum(),
            eager_replace,
            [],
            B * (S * 17 + N * 20),
        ),
        GpuCase(
            "discriminator tail",
            lambda given, backend: rtd_loss(*given, label, mask, backend=backend).loss_sum,
            eager_tail,
            [normal(B * S, wide), normal(wide), normal(wide), normal(1)],
            3 * size * B * S * wide,
        ),
    ]
    for width in sizes.widths:
        key = DropoutKey(0.1, seed=1, step=2, site=3)

        def our_norm(given: list[torch.Tensor], backend: str, key: DropoutKey = key) -> torch.Tensor:
            return dropout_add_norm(*given, eps=1e-12, dropout=key, row_B=rows, backend=backend)

        def eager_norm(given: list[torch.Tensor], width: int = width) -> torch.Tensor:
            x, residual, scale, shift = given
            return F.layer_norm(F.dropout(x, 0.1) + residual, (width,), scale, shift, 1e-12)

        inputs = [normal(B, S, width), normal(B, S, width), normal(width), normal(width)]
        found.append(GpuCase(f"dropout+add+norm {width}", our_norm, eager_norm, inputs, 8 * size * B * S * width))
    return found
