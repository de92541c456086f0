"""Implements replaced-token detection (RTD), the objective of the ELECTRA paper.

1. Some tokens of each row are masked, and the generator reads the masked rows.
2. At each masked position, the generator's head computes the MLM loss and samples a token.
3. The samples replace the masked tokens. A token that differs from the original gets label 1, every other label 0.
4. The discriminator reads these corrupted rows, and its head computes the RTD loss of every real token.

    loss = mlm_weight * first_scale * mlm_loss_sum + rtd_weight * second_scale * rtd_loss_sum

With `discriminator_mlm_weight` above 0 ("joint MLM") the discriminator also predicts the original tokens at the masked
positions, from the corrupted rows. Its token head has a dense layer, a LayerNorm and a bias of its own; the output
matrix is the token table that the discriminator reads. The loss gets a third term,

    discriminator_mlm_weight * first_scale * token_loss_sum

[CLS], [SEP] and every unmasked token count in the RTD loss, as in Google's code. Pads do not.
"""

from __future__ import annotations

import torch
from electra_kernels.discriminator_tail import RtdOutput
from typing_extensions import override

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.corruption import CorruptingObjective, Corruption
from electra_dist.objectives.mlm import predict_slots, token_sums


class ReplacedTokenDetection(CorruptingObjective):
    """Replaced-token detection: the discriminator classifies every token as original or replaced."""

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        corruption = self.corrupt(batch)
        hidden_BSH = self.read(batch, corruption.corrupted_BS)
        rtd = self.classify(batch, corruption, hidden_BSH)
        loss = corruption.loss + batch.values.rtd_weight * batch.second_scale * rtd.loss_sum
        sums = corruption.sums | rtd_sums(rtd)
        if self.objective.discriminator_mlm_weight:
            prediction = predict_slots(self, batch, corruption.masking, hidden_BSH)
            loss = loss + self.objective.discriminator_mlm_weight * batch.first_scale * prediction.loss_sum
            sums |= token_sums(prediction)
        return self.output(batch, loss, sums, rtd.logits_T, corruption.label_BS, corruption.corrupted_BS)

    def detect(self, batch: Batch, corruption: Corruption) -> RtdOutput:
        """Run the discriminator on the corrupted rows; return its loss sum, its logits and counts for the metrics."""
        return self.classify(batch, corruption, self.read(batch, corruption.corrupted_BS))

    def classify(self, batch: Batch, corruption: Corruption, hidden_BSH: torch.Tensor) -> RtdOutput:
        """Run the detection head on the discriminator's states; return loss sum, logits and counts for the metrics."""
        weight_BS = self.detection_weights(batch, corruption)
        return self.towers.discriminator_head(hidden_BSH, corruption.label_BS, weight_BS, backend=self.backend)

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return the weight of each token in the discriminator's loss, [B, S], bool or float; pads have weight 0."""
        return batch.layout.is_real_BS
