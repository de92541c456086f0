"""Implements Replace MLM: masked language modelling without [MASK] (the paper's second ablation, section 3.4).

The large tower reads text whose masked positions hold the generator's samples instead of [MASK], and predicts the
original tokens at these positions. The generator learns by its own MLM loss, as in ELECTRA. `token_weight` weighs the
large tower's loss.
"""

from __future__ import annotations

from electra_dist.objectives.base import Batch, StepOutput
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.objectives.mlm import predict_slots, token_sums


class ReplaceMlm(CorruptingObjective):
    """Masked language modelling in which the large tower reads the generator's samples instead of [MASK]."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the sum of the generator's and the large tower's loss, each scaled and weighted.

        Both losses are cross-entropies of the original tokens, summed over the masked positions. The generator reads
        [MASK] there, and the large tower reads the generator's samples.

        Both scales must be 1 / (number of masked positions), to turn the sums into means: `batch.first_scale`
        multiplies the generator's loss, `batch.second_scale` the large tower's. `loss_counts` returns that number.
        """
        corruption = self.corrupt(batch)
        hidden_BSH = self.read(batch, corruption.corrupted_BS)
        prediction = predict_slots(self, batch, corruption.masking, hidden_BSH)
        loss = corruption.loss + self.objective.token_weight * batch.second_scale * prediction.loss_sum
        return self.output(batch, loss, corruption.sums | token_sums(prediction))
