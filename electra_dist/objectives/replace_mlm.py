"""Implements Replace MLM: masked language modelling without [MASK] (the paper's second ablation, section 3.4).

The discriminator reads text whose masked positions hold the generator's tokens instead of [MASK], and predicts the
original tokens at these positions. The generator learns by its own MLM loss, as in ELECTRA. `token_weight` weighs the
discriminator's loss.
"""

from __future__ import annotations

from typing_extensions import override

from electra_dist.objectives.base import Batch, StepOutput
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.objectives.mlm import predict_slots, token_sums


class ReplaceMlm(CorruptingObjective):
    """Masked language modelling in which the discriminator reads the generator's tokens instead of [MASK]."""

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        corruption = self.corrupt(batch)
        hidden_BSH = self.read(batch, corruption.corrupted_BS)
        prediction = predict_slots(self, batch, corruption.masking, hidden_BSH)
        loss = corruption.loss + self.objective.token_weight * batch.second_scale * prediction.loss_sum
        return self.output(batch, loss, corruption.sums | token_sums(prediction))
