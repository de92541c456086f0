"""Write the generator's samples into the rows and label the tokens that changed.

A slot is a place for one masked position of a row: its position, its sampled token and its weight.

Guarantee: a position without a slot of positive weight keeps its id. A position with one slot gets that slot's sample.
A position with several slots, which only `objective.masking: reference` produces, gets the floor of the mean of their
samples, as in the reference code (`scatter_update` of Google's ELECTRA, and its author's issue 41). No result depends
on the order of slots. A sample that equals the original is labelled original. Shapes are static and nothing waits for
the device.

Shapes: B rows, S positions, N slots per row.
"""

from __future__ import annotations

import torch

from electra_kernels.backend_choice import resolve_without_cuda


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
    nothing. Ids, positions and tokens are int64; `sampled_BN` may have any shape with B * N elements.
    """
    sampled_BN = sampled_BN.view(positions_BN.shape)
    if resolve_without_cuda(backend, ids_BS.device.type) == "triton":
        from electra_kernels.triton.replace_tokens import replace_and_label as replace_triton

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
