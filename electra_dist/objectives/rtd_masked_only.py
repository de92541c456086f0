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
        """Return the weight of each token in the loss, float32 [B, S]: how often masking has drawn its position."""
        return corruption.masking.slots_BS()
