"""All-Tokens MLM: every token is predicted, with a copy gate (the paper's third ablation, section 3.4).

The large tower reads the generator's text as in Replace MLM. At every real position t it predicts the original token
from a mixture of copying its input and a softmax, with a gate D = sigmoid(w . h_t + b):

    p(x) = D * [x is the input] + (1 - D) * softmax(x);   loss = -log p(original)

Cost: a softmax over the vocabulary at every position, not at the masked ones only.

Shapes: B rows, S tokens, T = B * S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from electra_dist.model.token_log_probs import token_log_probs
from electra_dist.objectives.base import Batch, StepOutput
from electra_dist.objectives.corruption import CorruptingObjective


class AllTokensMlm(CorruptingObjective):
    """Prediction of all tokens, copying allowed."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the generator's loss and that of all real tokens, added; the second scale is of real tokens."""
        corruption = self.corrupt(batch)
        original_T = batch.ids_BS.flatten()
        head = self.towers.token_head
        hidden_TH = self.read(batch, corruption.corrupted_BS).flatten(0, 1)
        softmax_T, best_T = token_log_probs(
            head.transform(hidden_TH), self.towers.discriminator_table(), head.bias, original_T, head.vocab_size
        )
        gate_T = self.towers.copy_gate(hidden_TH).squeeze(-1).to(softmax_T.dtype)
        is_copy_T = (corruption.corrupted_BS == batch.ids_BS).flatten()
        copied_T = torch.where(is_copy_T, F.logsigmoid(gate_T), -torch.inf)
        log_prob_T = torch.logaddexp(copied_T, F.logsigmoid(-gate_T) + softmax_T)
        weight_T = batch.layout.is_real_BS.flatten().to(log_prob_T.dtype)
        token_loss_sum = -(log_prob_T * weight_T).sum()
        loss = corruption.loss + self.objective.token_weight * batch.second_scale * token_loss_sum
        sums = {
            "token_loss_sum": token_loss_sum,
            "token_weight": weight_T.sum(),
            "token_correct": ((best_T == original_T) * weight_T).sum(),
        }
        return self.output(batch, loss, corruption.sums | sums)
