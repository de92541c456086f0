"""Implements ELECTRA 15 %: replaced-token detection at masked positions only (paper, first ablation, section 3.4).

The discriminator reads the same corrupted text as in ELECTRA, but its loss is only over the masked positions; no other
token contributes to the loss or to a gradient. With `masking: reference`, a position may be drawn twice. Its loss then
counts twice, in the sum and in the number that the sum is divided by, as in the generator's MLM loss.
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import Batch
from electra_dist.objectives.corruption import Corruption
from electra_dist.objectives.rtd import ReplacedTokenDetection


class MaskedOnlyDetection(ReplacedTokenDetection):
    """Replaced-token detection in which only masked positions count in the discriminator's loss."""

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return the factor of each token's loss in the discriminator's sum, float32 [B, S].

        The factor is the number of times that masking drew the position: 0 for an unmasked token, 1 for a masked one,
        and more where `masking: reference` drew it repeatedly. The factors therefore sum to the number of draws, which
        `loss_counts` returns for both losses. With `batch.second_scale` of 1 / that number, the discriminator's loss
        is a mean; `batch.first_scale` must have the same value, for the generator's loss.
        """
        return corruption.masking.slots_BS()
