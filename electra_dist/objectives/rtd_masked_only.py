"""Implements ELECTRA 15 %: replaced-token detection at masked positions only (paper, first ablation, section 3.4).

The discriminator reads the same corrupted text as in ELECTRA, but its loss is only over the masked positions; no other
token contributes to the loss or to a gradient. The loss is a mean over masked slots. A position that
`masking: reference` drew twice weighs double, as in the MLM loss.
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import Batch
from electra_dist.objectives.corruption import Corruption
from electra_dist.objectives.rtd import ReplacedTokenDetection


class MaskedOnlyDetection(ReplacedTokenDetection):
    """Replaced-token detection with a loss over the masked positions only."""

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return how often each position is masked, float32 [B, S], as its weight in the loss; 0 where it is not.

        `batch.first_scale` and `batch.second_scale` must both be 1 / (number of masked slots); `loss_counts` returns
        it.
        """
        return corruption.masking.slots_BS()
