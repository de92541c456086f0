"""Implements adversarial ELECTRA: by REINFORCE, the generator learns to fool the discriminator (paper, appendix F).

The discriminator learns as in ELECTRA. The generator does not learn by its MLM loss, which is only reported. Its
reward for the token that it inserts at a masked position is the discriminator's loss there, R = -log D(right label),
under the assumption that other replacements do not matter. The generator's parameters follow

    (R - b) * gradient of log p(inserted token),   b = -log sigmoid(w . h + c), a learned baseline of the position

where h is the generator's state and p the distribution that was sampled from, temperature included. The inserted
token is the one sampled from p, unless `masking: reference` drew the position more than once. The baseline learns by
cross-entropy between sigmoid(w . h + c) and D(right label) = exp(-R), and sends no gradient to h. The surrogate loss
of a step has the right gradient; its value has no meaning. `mlm_weight` weighs the loss of generator and baseline.

Source: Clark et al., appendix F, which leaves open whether the baseline trained the encoder.

Shapes: B rows, S tokens, N masked positions of every row, M = B * N, H width of the generator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.slots import replace_and_label
from typing_extensions import override

from electra_dist.model.heads import token_log_probs
from electra_dist.objectives.base import Batch, StepOutput, mlm_sums, rtd_sums
from electra_dist.objectives.corruption import Corruption
from electra_dist.objectives.rtd import ReplacedTokenDetection


class AdversarialGenerator(ReplacedTokenDetection):
    """Replaced-token detection whose generator learns by REINFORCE to raise the discriminator's loss."""

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        # The MLM loss is reported but not trained, so the head runs without gradient.
        masking = self.mask(batch)
        states_MH = self.generator_states(batch, masking)
        with torch.no_grad():
            mlm = self.predict(batch, states_MH, batch.ids_BS.gather(1, masking.position_BN), masking.weight_BN)
        sums = mlm_sums(mlm) | self.entropy_sums(batch, states_MH, masking.weight_BN)
        corrupted_BS, label_BS = replace_and_label(
            batch.ids_BS, masking.position_BN, masking.weight_BN, mlm.sampled_M, backend=self.backend
        )
        corruption = Corruption(
            masking=masking, corrupted_BS=corrupted_BS, label_BS=label_BS, loss=mlm.loss_sum, sums=sums
        )
        rtd = self.detect(batch, corruption)

        # A position that was drawn twice (`masking: reference`) holds the mean of its two sampled ids. The
        # discriminator judges the token that the row holds, so the reward is for that token, not for a sampled one.
        inserted_M = corrupted_BS.gather(1, masking.position_BN).flatten()

        # The discriminator's logit is for "replaced". Where the inserted token equals the original one, the logit for
        # the right label has the opposite sign.
        is_replaced_BN = label_BS.gather(1, masking.position_BN)
        logit_BN = rtd.logits_T.view_as(batch.ids_BS).gather(1, masking.position_BN)
        right_logit_M = torch.where(is_replaced_BN, logit_BN, -logit_BN).flatten()
        weight_M = masking.weight_BN.flatten()
        policy_loss_sum = self._policy_loss_sum(
            states_MH, inserted_M, right_logit_M, weight_M, batch.values.temperature
        )
        generator_loss = batch.values.mlm_weight * batch.first_scale * policy_loss_sum
        loss = generator_loss + batch.values.rtd_weight * batch.second_scale * rtd.loss_sum
        sums = corruption.sums | rtd_sums(rtd)
        return self.output(batch, loss, sums, rtd.logits_T, label_BS, corrupted_BS)

    def _policy_loss_sum(
        self,
        states_MH: torch.Tensor,
        inserted_M: torch.Tensor,
        right_logit_M: torch.Tensor,
        weight_M: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Add up the generator's REINFORCE loss and its baseline's loss over the M masked positions.

        Only the sum's gradient is meaningful. The reward is -log sigmoid(`right_logit_M`), of the discriminator's
        logits for the right labels. `inserted_M` are the tokens that the discriminator has read.
        """
        # log p(inserted token) under the distribution that was sampled from, with logits divided by the temperature.
        head = self.towers.generator_head
        inverse_temperature = 1.0 / temperature
        log_prob_M, _ = token_log_probs(
            head.transform(states_MH) * inverse_temperature,
            self.towers.embeddings.word.weight,
            head.bias * inverse_temperature,
            inserted_M,
            head.vocab_size,
        )
        right_logit_M = right_logit_M.to(log_prob_M.dtype)

        # The advantage is R - b with R = -log sigmoid(right logit) and b = -log sigmoid(baseline's logit). No gradient
        # passes through it, nor from the baseline to the generator.
        baseline_logit_M = self.towers.baseline(states_MH.detach()).squeeze(-1).to(log_prob_M.dtype)
        advantage_M = F.logsigmoid(baseline_logit_M.detach()) - F.logsigmoid(right_logit_M)

        # The baseline learns to predict D(right label). The generator raises the probability of tokens with a
        # positive advantage; a loss is minimised, hence the minus.
        baseline_loss_M = F.binary_cross_entropy_with_logits(
            baseline_logit_M, right_logit_M.sigmoid(), reduction="none"
        )
        generator_loss_M = advantage_M * log_prob_M
        return ((baseline_loss_M - generator_loss_M) * weight_M).sum()
