"""Masked language modelling by the large tower: BERT without next-sentence prediction.

No generator: the large tower reads the masked text and predicts the original at the masked positions through a head
that is tied to its token table. Masks are those of the other objectives (fresh at every step; `mask_token_prob` of
them show [MASK], the rest keep their token), as in Google's code; BERT's third branch, a random token, is not there.
"""

from __future__ import annotations

import torch
from electra_kernels.masked_gather import gather_masked
from electra_kernels.mlm_head import MlmHeadOutput

from electra_dist.objectives.base import Batch, Objective, StepOutput, mlm_sums
from electra_dist.objectives.masking import Masking


class MaskedLanguageModel(Objective):
    """One tower and its token head."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the loss of the masked tokens; there is no second loss."""
        masking = self.mask(batch)
        mlm = predict_slots(self, batch, masking, self.read(batch, masking.input_BS))
        return self.output(batch, self.objective.mlm_weight * batch.first_scale * mlm.loss_sum, mlm_sums(mlm))


def predict_slots(objective: Objective, batch: Batch, masking: Masking, hidden_BSH: torch.Tensor) -> MlmHeadOutput:
    """Return the large tower's loss of predicting the originals at the masked positions; nobody uses its samples.

    Args:
        objective: whose `token_head` predicts.
        batch: the original rows.
        masking: slots of each row.
        hidden_BSH: the large tower's states.
    """
    return objective.towers.token_head(
        gather_masked(hidden_BSH, masking.position_BN, backend=objective.backend),
        objective.towers.discriminator_table(),
        batch.ids_BS.gather(1, masking.position_BN).flatten(),
        masking.weight_BN.flatten(),
        seed=batch.seed,
        step=batch.step,
        row_M=batch.slot_number_M(masking.position_BN.shape[1]),
        temperature=1.0,
        disallow_correct=False,
        backend=objective.backend,
    )
