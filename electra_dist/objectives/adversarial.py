"""Adversarial ELECTRA: the generator learns to fool the discriminator, by REINFORCE (the paper's appendix F).

The discriminator learns as in ELECTRA. The generator has no MLM loss. Its reward for the sample at a masked slot is
the discriminator's loss there, R = -log D(right label), under the assumption that other replacements do not matter:

    gradient = (R - b) * gradient of log p(sample),   b = -log sigmoid(w . h + c), a learned baseline of the slot

The baseline learns by cross-entropy between sigmoid(w . h + c) and D(right label) = exp(-R), on the generator's states
without sending them a gradient. p is what was sampled from, temperature included. Samples are drawn by (seed, step,
row) like everything else; a step's surrogate loss has the right gradient, not a value that means anything.

`mlm_weight` weighs the generator's losses; its MLM loss is reported, not trained.

Source: Clark et al., appendix F; whether the baseline trained the encoder is not said there.

Shapes: B rows, S tokens, M masked slots, H width of the generator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from electra_dist.model.token_log_probs import token_log_probs
from electra_dist.objectives.base import Batch, StepOutput, mlm_sums, rtd_sums
from electra_dist.objectives.corruption import Corruption
from electra_dist.objectives.rtd import ReplacedTokenDetection


class AdversarialGenerator(ReplacedTokenDetection):
    """ELECTRA whose generator wants the discriminator to be wrong."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the discriminator's loss and the generator's policy loss, added."""
        masking = self.mask(batch)
        states_MH = self.generator_states(batch, masking)
        with torch.no_grad():
            mlm = self.fill(batch, masking, states_MH)
        corrupted_BS, label_BS = self.replace(batch, masking, mlm.sampled_M)
        corruption = Corruption(masking, corrupted_BS, label_BS, mlm.loss_sum, mlm_sums(mlm))
        rtd = self.detect(batch, corruption)

        label_BN = label_BS.gather(1, masking.position_BN)
        logit_BN = rtd.logits_T.view_as(batch.ids_BS).gather(1, masking.position_BN)
        right_M = torch.where(label_BN, logit_BN, -logit_BN).flatten()  # logit of the right label
        policy_loss_sum = self._policy_loss_sum(states_MH, mlm.sampled_M, right_M, masking.weight_BN.flatten())
        loss = (
            self.objective.mlm_weight * batch.first_scale * policy_loss_sum
            + self.objective.rtd_weight * batch.second_scale * rtd.loss_sum
        )
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, label_BS)

    def _policy_loss_sum(
        self, states_MH: torch.Tensor, sampled_M: torch.Tensor, right_M: torch.Tensor, weight_M: torch.Tensor
    ) -> torch.Tensor:
        """Return the scalar whose gradient is REINFORCE's, with the baseline's own loss.

        Args:
            states_MH: the generator's states of the slots, with gradient.
            sampled_M: int64 samples.
            right_M: the discriminator's logits of the right labels.
            weight_M: 1 in used slots, 0 in empty ones.
        """
        head, cold = self.towers.generator_head, 1.0 / self.objective.temperature
        log_prob_M, _ = token_log_probs(
            head.transform(states_MH) * cold,
            self.towers.embeddings.word.weight,
            head.bias * cold,
            sampled_M,
            head.vocab_size,
        )
        right_M = right_M.to(log_prob_M.dtype)
        baseline_M = self.towers.baseline(states_MH.detach()).squeeze(-1).to(log_prob_M.dtype)
        advantage_M = F.logsigmoid(baseline_M.detach()) - F.logsigmoid(right_M)
        baseline_loss_M = F.binary_cross_entropy_with_logits(baseline_M, right_M.sigmoid(), reduction="none")
        return ((baseline_loss_M - advantage_M * log_prob_M) * weight_M).sum()
