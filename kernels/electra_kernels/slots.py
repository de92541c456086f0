"""Draw the masked positions of rows, gather their hidden states, and write the generator's samples into the rows.

A slot is a place for one masked position. Every row has N slots, of which a row with fewer masked positions leaves
some unused, with weight 0 and, from `mask_positions`, position 0. So shapes are static and nothing waits for the
device.

Guarantee, `mask_positions`: a pure function of (seed, step, row number, ids), independent of the other rows of the
batch, of the rank and of the device. All results are integers or 0 and 1, so the kernel's equal the reference's
exactly. Each candidate of a row (a token that may be masked) gets a random key, and the candidates with the smallest
keys are taken, in the order of their keys. The reference sorts the keys. The kernel counts, for each candidate, how
many candidates have a smaller key: that is the number of its slot.

Guarantee, `gather_masked`: backward adds the gradients of slots that share a position, in fp32 and in slot order, so
that the result is the same in every run. An empty slot may point at any position; its gradient is 0, because its
weight in the loss is 0. Forward is an index_select. Backward is an index_add in the reference; in Triton it is one
program per position, which looks for its slots and writes its gradient once, without atomics or a separate zero fill.

Guarantee, `replace_and_label`: a position without a slot of positive weight keeps its id. A position with one slot
gets that slot's sample. A position with several slots, which only `objective.masking: reference` produces, gets the
floor of the mean of their samples, as in the reference code (`scatter_update` of Google's ELECTRA, and its author's
issue 41). No result depends on the order of slots. A sample that equals the original is labelled original.

Cost of `mask_positions`: one launch with Triton; about 250 operators in plain PyTorch on a GPU, because torch has no
unsigned 32-bit words and the random numbers take ten rounds of small operations. Cost of `gather_masked` at 64 x 512 x
256 bf16 and N = 128: 8 MB forward, 21 MB backward.

Shapes: B rows, S positions, N slots per row, M = B * N, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from electra_kernels.backend_choice import resolve
from electra_kernels.keyed_random import Purpose, bits_grid, device_keys
from electra_kernels.operation_types import SpecialIds

_POSITION_BITS = 20  # lowest bits of a sort key, which hold the position, so that the keys of a row are distinct


def is_candidate(ids_BS: torch.Tensor, special: SpecialIds) -> torch.Tensor:
    """Return which tokens may be masked, bool [B, S]: all but [PAD], [CLS], [SEP] and [MASK]."""
    return (ids_BS != special.pad) & (ids_BS != special.cls) & (ids_BS != special.sep) & (ids_BS != special.mask)


def mask_positions(
    ids_BS: torch.Tensor,
    row_B: torch.Tensor,
    wanted_R: torch.Tensor,
    special: SpecialIds,
    *,
    num_slots: int,
    mask_token_prob: float,
    seed: int,
    step: int,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the masked positions of each row without replacement, and build rows that show [MASK] there.

    Every row has N = `num_slots` slots, places for one masked position each. The results are the slots' positions,
    int64 [B, N], their weights (1 if used, else 0), fp32 [B, N], and the masked rows, int64 [B, S].

    `row_B` are the row numbers within the global batch. Element r of `wanted_R`, int64 [S + 1] on the device of the
    ids, is the number of positions to mask in a row with r tokens that are not [PAD], at most N; a row with fewer
    tokens that may be masked masks all of them. Of the used slots, the share `mask_token_prob` shows [MASK], and the
    others show the original token. `step` is in [0, 2**32).
    """
    shown = round(mask_token_prob * 2**32)
    if resolve(backend, ids_BS.device.type, in_cuda_library=False) == "triton":
        from electra_kernels.triton.slots import mask_positions as mask_triton

        key = device_keys(seed, step, ids_BS.device)
        return mask_triton(ids_BS, row_B, wanted_R, special, num_slots, shown, key)
    return mask_positions_reference(ids_BS, row_B, wanted_R, special, num_slots, shown, seed, step)


def mask_positions_reference(
    ids_BS: torch.Tensor,
    row_B: torch.Tensor,
    wanted_R: torch.Tensor,
    special: SpecialIds,
    num_slots: int,
    shown: int,
    seed: int,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions, weights and masked rows in plain PyTorch; this is the definition of `mask_positions`.

    `shown` is the probability that a masked position shows [MASK], times 2**32.
    """
    candidate_BS = is_candidate(ids_BS, special)
    num_real_B = (ids_BS != special.pad).sum(1)
    num_used_B = torch.minimum(wanted_R[num_real_B], candidate_BS.sum(1))
    is_used_BN = torch.arange(num_slots, device=ids_BS.device) < num_used_B[:, None]
    bits_BS = bits_grid(seed, Purpose.MASK_POSITION, step, row_B, ids_BS.shape[1])
    drawn_BN = _smallest_keys(bits_BS, candidate_BS, num_slots)
    position_BN = torch.where(is_used_BN, drawn_BN, 0)
    input_BS = show_masks(ids_BS, position_BN, is_used_BN, special.mask, shown, seed, step, row_B)
    return position_BN, is_used_BN.float(), input_BS


def show_masks(
    ids_BS: torch.Tensor,
    position_BN: torch.Tensor,
    is_used_BN: torch.Tensor,
    mask_id: int,
    shown: int,
    seed: int,
    step: int,
    row_B: torch.Tensor,
) -> torch.Tensor:
    """Return the rows with [MASK] at a random share `shown` / 2**32 of their masked positions, int64 [B, S].

    Each row has N slots, each with a masked position, which several slots may share. A used slot shows [MASK] if its
    32 random bits are below `shown`; otherwise the token stays.
    """
    keep_bits_BN = bits_grid(seed, Purpose.MASK_KEEP, step, row_B, position_BN.shape[1])
    shows_mask_BN = is_used_BN & (keep_bits_BN < shown)
    # Count the [MASK]s of each position. An empty slot adds 0 at position 0, and a position that was drawn twice shows
    # [MASK] if either of its slots does.
    num_masks_BS = torch.zeros_like(ids_BS).scatter_add(1, position_BN, shows_mask_BN.long())
    return torch.where(num_masks_BS > 0, mask_id, ids_BS)


def _smallest_keys(bits_BS: torch.Tensor, candidate_BS: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return N different positions drawn from the candidates of each row, int64 [B, N], in random order.

    The candidates are sorted by keys. A key is the position's 32-bit random word, followed by the position itself as
    its lowest bits; so all keys of a row differ, and the position can be read from a sorted key. If a row has fewer
    than N candidates, its last entries are meaningless, and the caller must not use them.
    """
    S = bits_BS.shape[1]
    assert S <= 1 << _POSITION_BITS
    key_BS = (bits_BS << _POSITION_BITS) | torch.arange(S, device=bits_BS.device)

    # Tokens that may not be masked are sorted to the end.
    largest_key = torch.iinfo(torch.int64).max
    sorted_key_BS = torch.where(candidate_BS, key_BS, largest_key).sort(1).values

    position_bits = (1 << _POSITION_BITS) - 1
    return sorted_key_BS[:, :num_slots] & position_bits


def gather_masked(hidden_BSH: torch.Tensor, positions_BN: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Return the hidden states at `positions_BN`, [B * N, H]; row b * N + n has the state at positions_BN[b, n].

    Positions are int64 in [0, S), also those of empty slots, and several slots may share one. There is a gradient with
    respect to `hidden_BSH`, but no second derivative. The backend concerns the backward pass only.
    """
    return _GatherMasked.apply(
        hidden_BSH, positions_BN, resolve(backend, hidden_BSH.device.type, in_cuda_library=False)
    )


def scatter_add_reference(grad_MH: torch.Tensor, positions_BN: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return the gradient of `gather_masked` by its hidden states, [B, S, H], in plain PyTorch, as kernels must.

    The gradient of a position is the sum of the rows of `grad_MH` that were gathered from this position, in fp32 (fp64
    for fp64). It is 0 where none was.
    """
    num_rows = len(positions_BN)
    hidden = grad_MH.shape[1]
    sum_dtype = torch.promote_types(grad_MH.dtype, torch.float32)
    sums = torch.zeros(num_rows * seq_len, hidden, dtype=sum_dtype, device=grad_MH.device)
    sums.index_add_(0, _flat_positions(positions_BN, seq_len), grad_MH.to(sum_dtype))
    return sums.view(num_rows, seq_len, -1).to(grad_MH.dtype)


def _flat_positions(positions_BN: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Number the positions over all rows, int64 [B * N]: position s of row b becomes b * seq_len + s."""
    first_position_B1 = torch.arange(len(positions_BN), device=positions_BN.device)[:, None] * seq_len
    return (positions_BN + first_position_B1).reshape(-1)


class _GatherMasked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BSH: torch.Tensor, positions_BN: torch.Tensor, backend: str) -> torch.Tensor:
        seq_len = hidden_BSH.shape[1]
        ctx.save_for_backward(positions_BN)
        ctx.seq_len = seq_len
        ctx.backend = backend
        return hidden_BSH.flatten(0, 1).index_select(0, _flat_positions(positions_BN, seq_len))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (positions_BN,) = ctx.saved_tensors
        if ctx.backend == "triton":
            from electra_kernels.triton.slots import scatter_add

            grad_hidden_BSH = scatter_add(grad_MH, positions_BN, ctx.seq_len)
        else:
            grad_hidden_BSH = scatter_add_reference(grad_MH, positions_BN, ctx.seq_len)
        return grad_hidden_BSH, None, None


def replace_and_label(
    ids_BS: torch.Tensor,
    positions_BN: torch.Tensor,
    weight_BN: torch.Tensor,
    sampled_BN: torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write sampled tokens into rows; return the rows and where their ids changed, int64 and bool [B, S].

    A row has N slots, each with a position in [0, S), a sampled token and a weight. A slot of weight 0 changes
    nothing; where slots share a position, the mean of their tokens is written, rounded down. Ids, positions and tokens
    are int64; `sampled_BN` may have any shape with B * N elements.
    """
    sampled_BN = sampled_BN.view(positions_BN.shape)
    if resolve(backend, ids_BS.device.type, in_cuda_library=False) == "triton":
        from electra_kernels.triton.slots import replace_and_label as replace_triton

        return replace_triton(ids_BS, positions_BN, weight_BN, sampled_BN)
    return replace_and_label_reference(ids_BS, positions_BN, weight_BN, sampled_BN)


def replace_and_label_reference(
    ids_BS: torch.Tensor, positions_BN: torch.Tensor, weight_BN: torch.Tensor, sampled_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return corrupted rows and labels in plain PyTorch; this is the definition of `replace_and_label`."""
    is_written_BN = (weight_BN > 0).to(ids_BS.dtype)
    # The number of written slots, and the sum of their samples, at each position.
    count_BS = torch.zeros_like(ids_BS).scatter_add_(1, positions_BN, is_written_BN)
    total_BS = torch.zeros_like(ids_BS).scatter_add_(1, positions_BN, sampled_BN.to(ids_BS.dtype) * is_written_BN)
    mean_BS = total_BS.div(count_BS.clamp(min=1), rounding_mode="floor")
    corrupted_BS = torch.where(count_BS > 0, mean_BS, ids_BS)
    return corrupted_BS, corrupted_BS != ids_BS
