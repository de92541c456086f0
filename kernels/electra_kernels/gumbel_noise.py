"""Compute Gumbel noise from random bits, for drawing tokens from a softmax.

The token with the largest logit + Gumbel noise is a draw from softmax(logits). The bits come from `keyed_random`, so
the noise is a function of seed, step, row and token.
"""

from __future__ import annotations

import torch

SERIES_BELOW = 1 << 27  # bits below this number mean u < 1/32
_MAX_BITS = (1 << 32) - 1


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Turn random bits into standard Gumbel noise, fp32 of the same shape, finite for every input.

    Args:
        bits: int64 of any shape, each in [0, 2**32).
    """
    u = bits.float().add_(0.5).mul_(2.0**-32)
    # u + u^2/2 + u^3/3 + u^4/4 + u^5/5: at u = 1/32, the next term is 5e-9 of the sum.
    series = u.mul(1 / 5).add_(1 / 4).mul_(u).add_(1 / 3).mul_(u).add_(1 / 2).mul_(u).add_(1.0).mul_(u)
    # The complement of the bits gives 1 - u without a subtraction, which would cancel digits where u is near 1.
    one_minus_u = (_MAX_BITS - bits).float().add_(0.5).mul_(2.0**-32)
    exponential = torch.where(bits < SERIES_BELOW, series, one_minus_u.log_().neg_())
    return exponential.log_().neg_()
