"""Compute Gumbel noise from random bits, for drawing tokens from a softmax.

The token with the largest logit + Gumbel noise is a draw from softmax(logits). The bits come from `keyed_random`, so
the noise is a function of seed, step, row and token.
"""

from __future__ import annotations

import torch

SERIES_BELOW = 1 << 27  # bits below this number mean u < 1/32
_MAX_BITS = (1 << 32) - 1


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Turn random bits, int64 in [0, 2**32), into standard Gumbel noise, fp32 of the same shape, always finite.

    The noise is -log(E) with E = -log(1 - u) and u = (bits + 1/2) / 2**32, so E is a draw from the exponential
    distribution. Where u < 1/32, E is a power series in u, because 1 - u would lose digits of u. The relative error of
    E against exact arithmetic on the same bits is below 4e-7.
    """
    u = bits.float().add_(0.5).mul_(2.0**-32)
    # u + u^2/2 + u^3/3 + u^4/4 + u^5/5: at u = 1/32, the next term is 5e-9 of the sum.
    series = u.mul(1 / 5).add_(1 / 4).mul_(u).add_(1 / 3).mul_(u).add_(1 / 2).mul_(u).add_(1.0).mul_(u)
    # The complement of the bits gives 1 - u without a subtraction, which would cancel digits where u is near 1.
    one_minus_u = (_MAX_BITS - bits).float().add_(0.5).mul_(2.0**-32)
    exponential = torch.where(bits < SERIES_BELOW, series, one_minus_u.log_().neg_())
    return exponential.log_().neg_()
