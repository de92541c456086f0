"""ELECTRA 15 %: replaced-token detection at the masked positions only (the paper's first ablation, section 3.4).

The discriminator reads the same corrupted text and tells replaced from original tokens where a mask was; no other
token has a loss or sends a gradient. Its loss is a mean over masked slots; a position that `masking: reference` drew
twice weighs double, as in the MLM loss.
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import Batch
from electra_dist.objectives.corruption import Corruption
from electra_dist.objectives.rtd import ReplacedTokenDetection


class MaskedOnlyDetection(ReplacedTokenDetection):
    """Detection of replaced tokens where masks were."""

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return float32 [B, S]: the number of slots at each position; both scales are of masked slots."""
        return corruption.masking.slots_BS()
