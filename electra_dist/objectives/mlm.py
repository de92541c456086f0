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
from electra_dist.objectives.masking import Masking, mask_rows


class MaskedLanguageModel(Objective):
    """One tower and its token head."""

    def forward(
        self,
        ids_BS: torch.Tensor,
        row_B: torch.Tensor,
        step: int,
        seed: int,
        mlm_scale: float | torch.Tensor,
        rtd_scale: float | torch.Tensor,
    ) -> StepOutput:
        """See `Objective.forward`; there is no second loss."""
        batch = self.batch(ids_BS, row_B, step, seed)
        masking = mask_rows(ids_BS, self.special, self.objective, seed, step, row_B)
        mlm = predict_slots(self, batch, masking, self.read(batch, masking.input_BS))
        return self.output(batch, self.objective.mlm_weight * mlm_scale * mlm.loss_sum, mlm_sums(mlm))


def predict_slots(objective: Objective, batch: Batch, masking: Masking, hidden_BSH: torch.Tensor) -> MlmHeadOutput:
    """The large tower's loss of predicting the originals at the masked positions; nobody uses its samples."""
    N = masking.position_BN.shape[1]
    return objective.towers.token_head(
        gather_masked(hidden_BSH, masking.position_BN, backend=objective.backend),
        objective.towers.discriminator_table(),
        batch.ids_BS.gather(1, masking.position_BN).flatten(),
        masking.weight_BN.flatten(),
        seed=batch.seed,
        step=batch.step,
        row_M=(batch.row_B[:, None] * N + torch.arange(N, device=batch.row_B.device)).flatten(),
        temperature=1.0,
        disallow_correct=False,
        backend=objective.backend,
    )
