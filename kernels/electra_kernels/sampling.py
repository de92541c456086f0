"""Sample one token per row by Gumbel-max, with noise that is a function of (seed, step, global row, token id).

Guarantee: the drawn token of row m is the v with the largest `logit / temperature + Gumbel(bits)`, where bits is
`bits_grid(seed, Purpose.SAMPLE, step, row_M)[m, v]`. The noise of a token therefore does not depend on how the work is
split (into chunks, tiles, batches or ranks) or on restarts. Given the same logits, an implementation draws the same
token for any split. Two implementations can differ only where the two best candidates are closer than their rounding
(candidates 1e-4 apart are safe). A tie goes to the lower token id. A logit of -inf is never drawn while another is
finite, because the noise is always finite.

How: the noise is -log E, where E = -log(1 - u) is a draw from the exponential distribution and u = (bits + 1/2) /
2**32. The token that wins usually has a small E, so E must be accurate where u is near 0: for u < 1/32, E is a series
in u. Elsewhere, 1 - u is computed from the complement of the bits, so that it is never rounded to 0. Thus 0 < E < 23
and the noise lies in [-3.14, 22.88]. The plain formula in fp32 would give infinite noise 15 times a step at 8192 rows
of 30522 tokens.

Cost on a CPU: 22 ns for each logit on one core, and temporaries of a few MB. In the kernel that also computes the
generator's loss, sampling reads nothing in addition.

Limits: the logits are not covered by the guarantee. A matrix product of another shape may round them differently.

Shapes: M rows, V tokens.
"""

from __future__ import annotations

import torch

from electra_kernels.keyed_random import Purpose, bits_grid

SERIES_BELOW = 1 << 27  # bits below this number mean u < 1/32
_MAX_BITS = (1 << 32) - 1


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Turn random bits, int64 in [0, 2**32), into standard Gumbel noise, fp32 of the same shape, always finite.

    The noise is -log(E) for a draw E from the exponential distribution. The relative error of E against exact
    arithmetic on the same bits is below 4e-7.
    """
    u = bits.float().add_(0.5).mul_(2.0**-32)
    # u + u^2/2 + u^3/3 + u^4/4 + u^5/5: at u = 1/32, the next term is 5e-9 of the sum.
    series = u.mul(1 / 5).add_(1 / 4).mul_(u).add_(1 / 3).mul_(u).add_(1 / 2).mul_(u).add_(1.0).mul_(u)
    # The complement of the bits gives 1 - u without a subtraction, which would cancel digits where u is near 1.
    one_minus_u = (_MAX_BITS - bits).float().add_(0.5).mul_(2.0**-32)
    exponential = torch.where(bits < SERIES_BELOW, series, one_minus_u.log_().neg_())
    return exponential.log_().neg_()


def sample_reference(
    logits_MV: torch.Tensor,
    seed: int,
    step: int,
    row_M: torch.Tensor,
    temperature: float = 1.0,
    forbidden_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row from softmax(logits / temperature), int64 [M], in plain PyTorch.

    `row_M` are the row numbers within the global batch, in [0, 2**32). Token `forbidden_M[m]` is not drawn in row m.
    The computation is in fp32, or in fp64 for fp64 logits. Temporaries are as large as the logits, so pass at most
    `block_rows` rows at a time.
    """
    vocab_size = logits_MV.shape[1]
    score_dtype = torch.promote_types(logits_MV.dtype, torch.float32)
    bits_MV = bits_grid(seed, Purpose.SAMPLE, step, row_M, num_positions=vocab_size)
    score_MV = gumbel_from_bits(bits_MV).to(score_dtype)
    score_MV += logits_MV * (1.0 / temperature)
    if forbidden_M is not None:
        score_MV.scatter_(1, forbidden_M[:, None], -torch.inf)
    return score_MV.argmax(1)


def block_rows(logits_MV: torch.Tensor) -> int:
    """Return how many rows of logits to sample at a time, at least 1, so that temporary tensors stay small."""
    # On a CPU, malloc reuses temporaries of this size, while larger ones cause page faults every time. On a GPU, the
    # temporaries of this many logits take 1 GB.
    logits_per_block = 2**16 if logits_MV.device.type == "cpu" else 2**24
    logits_per_row = max(1, logits_MV.shape[1])
    return max(1, logits_per_block // logits_per_row)
