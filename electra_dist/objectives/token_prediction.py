"""Implements the objectives whose kept network predicts original tokens: MLM, Replace MLM and All-Tokens MLM.

MLM is BERT without next-sentence prediction. The only network, `towers.discriminator`, reads the masked text and
predicts the original tokens at the masked positions. The output matrix of its head is its token table. As in Google's
ELECTRA code, a share `mask_token_prob` of the positions show [MASK] and the others keep their token; none shows a
random token, as some do in BERT.

Replace MLM is MLM without [MASK] (the paper's second ablation, section 3.4). The discriminator reads text whose masked
positions hold the generator's tokens instead of [MASK], and predicts the original tokens at these positions. The
generator learns by its own MLM loss, as in ELECTRA. `token_weight` weighs the discriminator's loss.

All-Tokens MLM predicts every token, with a copy gate (the paper's third ablation, section 3.4), from the same text as
Replace MLM. At each position t but padding, it predicts the original token x with a mixture of two distributions: one
copies the token read at t, the other is a softmax over the vocabulary. A learned gate D = sigmoid(w . h_t + b) on the
discriminator's state h_t weighs them:

    p(x) = D * [x is the token that is read] + (1 - D) * softmax(x);   loss = -log p(x)

Its cost is a softmax over the vocabulary at every position, not only at the masked ones.

Shapes: B rows, S tokens, T = B * S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from typing_extensions import override

from electra_dist.model.heads import token_log_probs
from electra_dist.objectives.base import Batch, Objective, StepOutput, mlm_sums, token_sums
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.objectives.masking import num_masked


class MaskedLanguageModel(Objective):
    """Masked language modelling as in BERT, with one network: no generator and no discriminator."""

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        masking = self.mask(batch)
        hidden_BSH = self.read(batch, masking.input_BS)
        mlm = self.predict_slots(batch, masking, hidden_BSH)
        loss = batch.values.mlm_weight * batch.first_scale * mlm.loss_sum
        return self.output(batch, loss, mlm_sums(mlm))


class ReplaceMlm(CorruptingObjective):
    """Masked language modelling in which the discriminator reads the generator's tokens instead of [MASK]."""

    @override
    def loss_counts(self, ids_BS: torch.Tensor, mask_prob: float | None = None) -> torch.Tensor:
        num_masked_B = num_masked(ids_BS, self.special, self.objective, mask_prob)
        return torch.stack([num_masked_B, num_masked_B], -1)  # both networks predict at the masked positions

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        corruption = self.corrupt(batch)
        hidden_BSH = self.read(batch, corruption.corrupted_BS)
        prediction = self.predict_slots(batch, corruption.masking, hidden_BSH)
        loss = corruption.loss + self.objective.token_weight * batch.second_scale * prediction.loss_sum
        return self.output(batch, loss, corruption.sums | token_sums(prediction))


class AllTokensMlm(CorruptingObjective):
    """Objective that predicts every original token; a learned gate decides how far to copy the token that is read."""

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        corruption = self.corrupt(batch)
        hidden_TH = self.read(batch, corruption.corrupted_BS).flatten(0, 1)

        # log softmax(original), and the most probable token of the softmax.
        original_T = batch.ids_BS.flatten()
        head = self.towers.token_head
        softmax_log_prob_T, best_T = token_log_probs(
            head.transform(hidden_TH), self.towers.discriminator_table(), head.bias, original_T, head.vocab_size
        )

        # The two terms of the mixture as logarithms: log D where copying yields the original, and log(1 - D) +
        # log softmax(original).
        gate_logit_T = self.towers.copy_gate(hidden_TH).squeeze(-1).to(softmax_log_prob_T.dtype)
        reads_original_T = (corruption.corrupted_BS == batch.ids_BS).flatten()
        copying_T = torch.where(reads_original_T, F.logsigmoid(gate_logit_T), -torch.inf)
        predicting_T = F.logsigmoid(-gate_logit_T) + softmax_log_prob_T
        log_prob_T = torch.logaddexp(copying_T, predicting_T)

        weight_T = batch.layout.is_real_BS.flatten().to(log_prob_T.dtype)
        token_loss_sum = -(log_prob_T * weight_T).sum()
        loss = corruption.loss + self.objective.token_weight * batch.second_scale * token_loss_sum
        sums = {
            "token_loss_sum": token_loss_sum,
            "token_weight": weight_T.sum(),
            "token_correct": ((best_T == original_T) * weight_T).sum(),
        }
        return self.output(batch, loss, corruption.sums | sums)
