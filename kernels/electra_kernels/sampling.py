"""Sampling a token per row by Gumbel-max, with noise that is a function of (seed, step, global row, token id).

Guarantee: token v of row m competes with `logit / temperature + Gumbel(bits)`, where bits are the 32 of
`bits_grid(seed, Purpose.SAMPLE, step, row_M)[m, v]`. The noise of a token therefore knows nothing of chunk, tile,
batch split, rank or restart; given the same logits every implementation draws the same token for any split, and two
implementations can differ only where the two best candidates are closer than their rounding (1e-4 is safe). Ties go
to the lower token id. A logit of -inf is never drawn while another is finite: the noise is always finite.

How: Gumbel noise is -log E with E = Exp(1) = -log(1 - u) and u = (bits + 1/2) / 2**32. Where the maximum is decided,
E is small, so u near 0 must be exact: there a series in u serves (u < 1/32), elsewhere 1 - u is formed from the
complement of the bits. Thus 0 < E < 23, noise lies in [-3.14, 22.88], and no rounding of u to 1 yields infinite
noise, which in fp32 would come up 15 times a step at 8192 rows of 30522.

Cost on a CPU: 22 ns for each logit on one core; scratch of a few MB. Inside the head's row kernel there is no extra
read.

Where it stops: the logits themselves. A matrix product of another shape may round them otherwise.

Shapes: M rows, V tokens.
"""

from __future__ import annotations

import torch

from electra_kernels.backend import resolve_without_cuda
from electra_kernels.gumbel import gumbel_from_bits
from electra_kernels.keyed_random import Purpose, bits_grid


def sample(
    logits_MV: torch.Tensor,
    *,
    seed: int,
    step: int,
    row_M: torch.Tensor,
    temperature: float = 1.0,
    backend: str = "auto",
) -> torch.Tensor:
    """One token for each row from softmax(logits / temperature), as [M] int64, without gradient.

    Args:
        logits_MV: floating point, any precision; computed with in fp32 (fp64 if they are).
        seed: the run's seed.
        step: global step, in [0, 2**32).
        row_M: int64, the number of each row within the global batch, in [0, 2**32).
        temperature: divides the logits, > 0.
        backend: see `backend.resolve`.
    """
    logits_MV = logits_MV.detach()
    if resolve_without_cuda(backend, logits_MV.device.type) == "triton":
        from electra_kernels.triton.mlm_head import sample as sample_triton

        return sample_triton(logits_MV, seed, step, row_M, temperature)
    height = block_rows(logits_MV)
    sampled_M = torch.empty_like(row_M)
    for begin in range(0, len(logits_MV), height):
        b = slice(begin, begin + height)
        sampled_M[b] = sample_reference(logits_MV[b], seed, step, row_M[b], temperature)
    return sampled_M


def sample_reference(
    logits_MV: torch.Tensor,
    seed: int,
    step: int,
    row_M: torch.Tensor,
    temperature: float = 1.0,
    forbidden_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition of `sample`, for a block of rows; `forbidden_M` names one token per row that is not drawn."""
    bits_MV = bits_grid(seed, Purpose.SAMPLE, step, row_M, logits_MV.shape[1])
    score_MV = gumbel_from_bits(bits_MV).to(torch.promote_types(logits_MV.dtype, torch.float32))
    score_MV += logits_MV * (1.0 / temperature) if temperature != 1.0 else logits_MV
    if forbidden_M is not None:
        score_MV.scatter_(1, forbidden_M[:, None], -torch.inf)
    return score_MV.argmax(1)


def block_rows(logits_MV: torch.Tensor) -> int:
    """Rows to work on at a time: on a CPU temporaries that malloc recycles (larger ones fault anew), on a GPU 1 GB."""
    cells = 1 << (16 if logits_MV.device.type == "cpu" else 24)
    return max(1, cells // max(1, logits_MV.shape[1]))
