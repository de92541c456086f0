"""Implements masked language modelling with one network: BERT without next-sentence prediction.

There is no generator. The only network, `towers.discriminator`, reads the masked text and predicts the original tokens
at the masked positions. The output matrix of its head is its token table. Positions are drawn anew at every step, as
for the other objectives. As in Google's ELECTRA code, a share `mask_token_prob` of them show [MASK] and the others
keep their token; none shows a random token, as some do in BERT.
"""

from __future__ import annotations

import torch
from electra_kernels.masked_gather import gather_masked
from electra_kernels.mlm_head import MlmHeadOutput
from typing_extensions import override

from electra_dist.objectives.base import Batch, Objective, StepOutput, mlm_sums
from electra_dist.objectives.masking import Masking


class MaskedLanguageModel(Objective):
    """Masked language modelling as in BERT, with one network: no generator and no discriminator."""

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        masking = self.mask(batch)
        hidden_BSH = self.read(batch, masking.input_BS)
        mlm = predict_slots(self, batch, masking, hidden_BSH)
        loss = batch.values.mlm_weight * batch.first_scale * mlm.loss_sum
        return self.output(batch, loss, mlm_sums(mlm))


def token_sums(prediction: MlmHeadOutput) -> dict[str, torch.Tensor]:
    """Return the results of the head with which a discriminator predicts tokens under their names in `Sums`."""
    return {
        "token_loss_sum": prediction.loss_sum,
        "token_weight": prediction.weight_sum,
        "token_correct": prediction.correct_sum,
    }


def predict_slots(objective: Objective, batch: Batch, masking: Masking, hidden_BSH: torch.Tensor) -> MlmHeadOutput:
    """Predict the original tokens at the masked positions from the discriminator's states; return loss and counts."""
    hidden_MH = gather_masked(hidden_BSH, masking.position_BN, backend=objective.backend)
    target_BN = batch.ids_BS.gather(1, masking.position_BN)
    return objective.towers.token_head(
        hidden_MH,
        objective.towers.discriminator_table(),
        target_BN.flatten(),
        masking.weight_BN.flatten(),
        seed=batch.seed,
        step=batch.step,
        key_2=batch.key_2,
        row_M=batch.slot_number_M(masking.position_BN.shape[1]),
        temperature=1.0,
        disallow_correct=False,
        backend=objective.backend,
    )
