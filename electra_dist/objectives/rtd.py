"""Implements replaced-token detection (RTD), the objective of the ELECTRA paper.

1. Some tokens of each row are masked, and the generator reads the masked rows.
2. At each masked position, the generator's head computes the MLM loss and samples a token.
3. The samples replace the masked tokens. A token that differs from the original gets label 1, every other label 0.
4. The discriminator reads these corrupted rows, and its head computes the RTD loss of every real token.

    loss = mlm_weight * first_scale * mlm_loss_sum + rtd_weight * second_scale * rtd_loss_sum

[CLS], [SEP] and every unmasked token count in the RTD loss, as in Google's code. Pads do not.

With `discriminator_mlm_weight` above 0 ("joint MLM") the discriminator also predicts the original tokens at the masked
positions, from the corrupted rows. Its token head is its own, but for the output matrix, which is the token table that
the discriminator reads. The loss gets a third term, discriminator_mlm_weight * first_scale * token_loss_sum.

With `rtd_balance` b, each of the R replaced tokens of a row of N tokens has the weight b N / R in the RTD loss, and
each other token (1 - b) N / (N - R). Both classes then have fixed shares, and the row still counts as N tokens,
however a batch is split. Metrics count tokens, not weights.

ELECTRA 15 % (first ablation, section 3.4) detects at masked positions only: no other token contributes to the loss or
to a gradient. With `masking: reference`, a position that is drawn twice counts twice, as in the generator's loss.

Two-stage training (section 3.2): in the first `objective.generator_only_steps` steps the generator trains by MLM and
the discriminator does not run. Then the discriminator becomes a copy of the generator, embeddings included, and learns
from the samples of the generator, which is frozen from there on. `engine/stage_switch.py` makes the copy and sets the
learning rates. In evaluation both run, whatever the step. The two networks must be of one size and share nothing
(`model.sharing: none`).

Adversarial ELECTRA (appendix F): by REINFORCE, the generator learns to fool the discriminator, which learns as in
ELECTRA. The generator does not learn by its MLM loss, which is only reported. Its reward for the token that it inserts
at a masked position is the discriminator's loss there, R = -log D(right label), under the assumption that other
replacements do not matter. The generator's parameters follow

    (R - b) * gradient of log p(inserted token),   b = -log sigmoid(w . h + c), a learned baseline of the position

where h is the generator's state and p the distribution that was sampled from, temperature included. The inserted
token is the one sampled from p, unless `masking: reference` drew the position more than once. The baseline learns by
cross-entropy between sigmoid(w . h + c) and D(right label) = exp(-R), and sends no gradient to h; the paper leaves
open whether it trained the encoder. The surrogate loss of a step has the right gradient; its value has no meaning.
`mlm_weight` weighs the loss of generator and baseline.

Shapes: B rows, S tokens, T = B * S, N masked positions of every row, M = B * N, H width of a network.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import RtdOutput
from electra_kernels.slots import replace_and_label
from typing_extensions import override

from electra_dist.model.heads import token_log_probs
from electra_dist.objectives.base import Batch, StepOutput, mlm_sums, rtd_sums, token_sums
from electra_dist.objectives.corruption import CorruptingObjective, Corruption
from electra_dist.objectives.masking import num_masked


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
            prediction = self.predict_slots(batch, corruption.masking, hidden_BSH)
            loss = loss + self.objective.discriminator_mlm_weight * batch.first_scale * prediction.loss_sum
            sums |= token_sums(prediction)
        return self.output(batch, loss, sums, rtd.logits_T, corruption.label_BS, corruption.corrupted_BS)

    def detect(self, batch: Batch, corruption: Corruption) -> RtdOutput:
        """Run the discriminator and its head on the corrupted rows; return loss sum, logits and counts for metrics."""
        return self.classify(batch, corruption, self.read(batch, corruption.corrupted_BS))

    def classify(self, batch: Batch, corruption: Corruption, hidden_BSH: torch.Tensor) -> RtdOutput:
        """Run the detection head on the discriminator's states; return loss sum, logits and counts for metrics."""
        weight_BS = self.detection_weights(batch, corruption)
        rtd = self.towers.discriminator_head(hidden_BSH, corruption.label_BS, weight_BS, backend=self.backend)
        if self.objective.rtd_balance is None:
            return rtd
        return rtd._replace(**_token_counts(rtd.logits_T, corruption.label_BS, batch.layout.is_real_BS))

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return the weight of each token in the discriminator's loss, [B, S], bool or float; pads have weight 0."""
        balance = self.objective.rtd_balance
        if balance is None:
            return batch.layout.is_real_BS
        return balanced_weights(corruption.label_BS, batch.layout.is_real_BS, balance)


def balanced_weights(label_BS: torch.Tensor, is_real_BS: torch.Tensor, balance: float) -> torch.Tensor:
    """Return weights, fp32 [B, S], with which the replaced tokens of a row have the share `balance` of its weight.

    The weights of a row add up to its number of real tokens. A row without tokens of one class has weights of 1.
    """
    num_real_B1 = is_real_BS.sum(1, keepdim=True)
    num_replaced_B1 = (label_BS & is_real_BS).sum(1, keepdim=True)
    num_original_B1 = num_real_B1 - num_replaced_B1
    has_both_B1 = (num_replaced_B1 > 0) & (num_original_B1 > 0)
    replaced_weight_B1 = balance * num_real_B1 / num_replaced_B1.clamp(min=1)
    original_weight_B1 = (1.0 - balance) * num_real_B1 / num_original_B1.clamp(min=1)
    weight_BS = torch.where(label_BS, replaced_weight_B1, original_weight_B1)
    return torch.where(has_both_B1, weight_BS, 1.0) * is_real_BS


def _token_counts(logits_T: torch.Tensor, label_BS: torch.Tensor, is_real_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Count replaced and original tokens, and those that the logits detect, under the names in `RtdOutput`."""
    says_replaced_BS = logits_T.view_as(label_BS) > 0
    is_replaced_BS = label_BS & is_real_BS
    is_original_BS = ~label_BS & is_real_BS
    return {
        "replaced_count": is_replaced_BS.sum(),
        "replaced_correct": (is_replaced_BS & says_replaced_BS).sum(),
        "original_count": is_original_BS.sum(),
        "original_correct": (is_original_BS & ~says_replaced_BS).sum(),
    }


class MaskedOnlyDetection(ReplacedTokenDetection):
    """Replaced-token detection in which only masked positions count in the discriminator's loss."""

    @override
    def loss_counts(self, ids_BS: torch.Tensor, mask_prob: float | None = None) -> torch.Tensor:
        num_masked_B = num_masked(ids_BS, self.special, self.objective, mask_prob)
        return torch.stack([num_masked_B, num_masked_B], -1)

    @override
    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        return corruption.masking.slots_BS()  # how often masking has drawn each position


class TwoStageDetection(ReplacedTokenDetection):
    """Replaced-token detection in two stages: the generator trains alone, then the discriminator does.

    The loss is that of the network that trains at this step; in evaluation, it is the discriminator's.
    """

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        in_first_stage = self.training and batch.step < self.objective.generator_only_steps
        # The generator is frozen after the first stage, so its forward pass then records no gradient.
        with torch.set_grad_enabled(torch.is_grad_enabled() and in_first_stage):
            corruption = self.corrupt(batch)
        if in_first_stage:
            return self.output(batch, corruption.loss, corruption.sums)

        rtd = self.detect(batch, corruption)
        loss = batch.values.rtd_weight * batch.second_scale * rtd.loss_sum
        sums = corruption.sums | rtd_sums(rtd)
        return self.output(batch, loss, sums, rtd.logits_T, corruption.label_BS, corruption.corrupted_BS)


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
