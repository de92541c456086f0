"""ELECTRA 15 %: replaced-token detection at the masked positions only (the paper's first ablation, section 3.4).

The discriminator reads the same corrupted text and tells replaced from original tokens where a mask was; no other
token has a loss or sends a gradient. Its loss is a mean over masked slots; a position that `masking: reference` drew
twice weighs double, as in the MLM loss.
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import StepOutput, rtd_sums
from electra_dist.objectives.rtd import ReplacedTokenDetection


class MaskedOnlyDetection(ReplacedTokenDetection):
    """Detection of replaced tokens where masks were."""

    def forward(
        self,
        ids_BS: torch.Tensor,
        row_B: torch.Tensor,
        step: int,
        seed: int,
        mlm_scale: float | torch.Tensor,
        rtd_scale: float | torch.Tensor,
    ) -> StepOutput:
        """See `Objective.forward`; both scales are of masked slots."""
        batch = self.batch(ids_BS, row_B, step, seed)
        corruption = self.corrupt(batch, mlm_scale)
        slots = corruption.masking
        weight_BS = torch.zeros(ids_BS.shape, device=ids_BS.device)
        weight_BS = weight_BS.scatter_add(1, slots.position_BN, slots.weight_BN)
        rtd = self.detect(batch, corruption, weight_BS)
        loss = corruption.loss + self.objective.rtd_weight * rtd_scale * rtd.loss_sum
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, corruption.label_BS)
