"""Fused operations that `gpu.py` checks and times, each with the alternatives that a user has without it.

The generator's head has functions of its own; every other operation is a `GpuCase`. Every head draws a sample. A rival
without a sampler gets a separate one, which computes the logits again, as its users have to.

Limits: a rival that is not installed is left out of the tables; the record's versions show which these are.

Shapes: M masked rows, D features, V padded vocabulary, B rows, S tokens, T = B * S, H hidden, N slots (masked
positions) per row.
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
from electra_kernels.replace_tokens import replace_and_label

from electra_dist.objectives.masking import num_slots


class Sizes(NamedTuple):
    """Sizes of all inputs: `LARGE` for the large model on one GPU, `TOY` for the smoke run."""

    masked: tuple[int, ...]  # Numbers of masked rows with which the head is timed.
    embedding: int  # Features of an embedding, which are the head's input.
    vocab: int  # Entries of the vocabulary.
    padded: int  # Rows of the embedding table, `vocab` rounded up.
    batch: int  # Rows of a micro-batch.
    seq_len: int  # Tokens of a row.
    slots: int  # Masked positions of a row.
    widths: tuple[int, int]  # Hidden widths of generator and discriminator.
    exact_rows: int  # Masked rows of the head in the comparison with float64.


_LARGE_SLOTS = num_slots(0.25, 512)  # 130
LARGE = Sizes(
    masked=(64 * _LARGE_SLOTS, 128 * _LARGE_SLOTS),
    embedding=1024,
    vocab=30522,
    padded=30592,
    batch=64,
    seq_len=512,
    slots=_LARGE_SLOTS,
    widths=(256, 1024),
    exact_rows=512,
)
TOY = Sizes((24,), 16, 300, 384, 2, 16, 4, (8, 16), 12)


class Head(NamedTuple):
    """Inputs of the generator's head, in the order of `mlm_head_loss_and_sample`'s arguments."""

    x_MD: torch.Tensor
    table_VD: torch.Tensor
    bias_V: torch.Tensor
    target_M: torch.Tensor
    weight_M: torch.Tensor

    def differentiable(self) -> list[torch.Tensor]:
        """Return the tensors that get a gradient: states, table and bias."""
        return [self.x_MD, self.table_VD, self.bias_V]


def head_inputs(sizes: Sizes, num_rows: int, device: str, dtype: torch.dtype) -> Head:
    """Return random inputs of the generator's head, with weights of 1.

    Args:
        sizes: Width, vocabulary and padded vocabulary.
        num_rows: Masked rows M.
        device: Device of all tensors.
        dtype: Type of states, table and bias.
    """

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
    """Compute the summed loss and the samples, int64 [M], with our fused head.

    Args:
        given: Inputs of the head.
        vocab: Entries of the vocabulary, without padding.
        backend: Implementation, as in `config.kernels.backend`.
        chunk: Rows that are computed at a time, which bounds the memory.
    """
    row_M = torch.arange(len(given.x_MD), device=given.x_MD.device)
    out = mlm_head_loss_and_sample(*given, seed=1, step=2, row_M=row_M, vocab_size=vocab, chunk=chunk, backend=backend)
    return out.loss_sum, out.sampled_M


def eager_head(given: Head, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed loss and the samples, int64 [M], in plain torch, with all logits in memory.

    It computes logits, fp32 cross-entropy and a Gumbel-max sample: the code that a user would write first.
    """
    logits_MV = (F.linear(given.x_MD, given.table_VD[:vocab]) + given.bias_V).float()
    loss_M = F.cross_entropy(logits_MV, given.target_M, reduction="none")
    return (loss_M * given.weight_M).sum(), _gumbel_max(logits_MV.detach())


def _gumbel_max(logits_MV: torch.Tensor) -> torch.Tensor:
    """Return a sample from the softmax of each row, int64 [M], by adding Gumbel noise and taking the largest."""
    uniform_MV = torch.rand_like(logits_MV).clamp_(1e-9, 1 - 6e-8)
    return (logits_MV - torch.log(-torch.log(uniform_MV))).argmax(1)


@torch.no_grad()
def separate_sample(given: Head, vocab: int) -> torch.Tensor:
    """Return samples, int64 [M], by computing the logits again in chunks of 4,096 rows.

    A fused cross-entropy that has no sampler needs this second pass.
    """
    chunks = given.x_MD.split(4096)
    return torch.cat([_gumbel_max(F.linear(x, given.table_VD[:vocab], given.bias_V).float()) for x in chunks])


def rival_heads(vocab: int, with_compile: bool) -> dict[str, Callable[[Head], tuple[torch.Tensor, torch.Tensor]]]:
    """Return the alternatives to our head by name, as functions from inputs to (loss, samples).

    Args:
        vocab: Entries of the vocabulary, without padding.
        with_compile: Whether to include torch.compile. Liger and cut-cross-entropy are included if installed.
    """
    rivals: dict[str, Callable[[Head], Any]] = {"eager": lambda given: eager_head(given, vocab)}
    if with_compile:
        # Shapes are static in training, so every number of rows gets a compilation of its own.
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
    """One fused operation other than the head, in our implementation and in eager torch."""

    name: str
    ours: Callable[[list[torch.Tensor], str], torch.Tensor]  # (inputs, backend) -> output
    eager: Callable[[list[torch.Tensor]], torch.Tensor]  # inputs -> output
    inputs: list[torch.Tensor]  # Tensors that get a gradient; empty if the operation has no backward pass.
    num_bytes: int  # Least memory traffic of forward and backward, in bytes.


def cases(sizes: Sizes, device: str, dtype: torch.dtype) -> list[GpuCase]:
    """Return all operations except the head, with random inputs of the model's sizes.

    These are the masked gather, the replacing of tokens, the discriminator tail, and dropout with residual and norm at
    both widths.

    Args:
        sizes: Sizes of the inputs.
        device: Device of all tensors.
        dtype: Type of the inputs that get a gradient.
    """
    B, S, N = sizes.batch, sizes.seq_len, sizes.slots
    size = torch.finfo(dtype).bits // 8  # Bytes per element.
    narrow, wide = sizes.widths

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    positions = torch.rand(B, S, device=device).argsort(1)[:, :N]
    flat_positions = (positions + torch.arange(B, device=device)[:, None] * S).flatten()
    rows = torch.arange(B, device=device)
    label = torch.rand(B * S, device=device) > 0.85
    mask = torch.rand(B * S, device=device) > 0.02
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
            lambda given: given[0].flatten(0, 1)[flat_positions],
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
    key = torch.tensor([1, 2, 1], device=device)  # seed, step, layer
    for width in sizes.widths:

        def our_norm(given: list[torch.Tensor], backend: str) -> torch.Tensor:
            return dropout_add_norm(*given, rows, key, 1, 0.1, 1e-12, backend)[0]

        def eager_norm(given: list[torch.Tensor], width: int = width) -> torch.Tensor:
            x, residual, scale, shift = given
            return F.layer_norm(F.dropout(x, 0.1) + residual, (width,), scale, shift, 1e-12)

        inputs = [normal(B, S, width), normal(B, S, width), normal(width), normal(width)]
        found.append(GpuCase(f"dropout+add+norm {width}", our_norm, eager_norm, inputs, 8 * size * B * S * width))
    return found
