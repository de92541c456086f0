"""Electric: an energy-based cloze model, trained against a noise distribution (Clark et al., EMNLP 2020).

    q(x_t | all other tokens)   two causal towers, one from each side; their states left and right of t, side by side,
                                through the token head; trained by -log q at every token that may be masked
    text with noise             masked positions hold samples from q; label 1 at every one of them, even a right guess
    logit_t = E(x)_t + log q(x_t) + log(p / (1 - p)),   p = mask_prob

so that -E(x)_t learns the log-probability of x_t up to a constant: one pass scores a whole text. q sees the original
text, not the noised one, and has no gradient through the logit.

Attention and neighbours stay inside an example; at its ends there is no neighbour and the half is zero.

Cost: a softmax over the vocabulary at every position, twice (the second time for log q of the noised text).

Shapes: B rows, S tokens, H width of one generator tower, T = B * S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from electra_dist.model.token_log_probs import token_log_probs
from electra_dist.objectives.base import GENERATOR, REVERSE, Batch, StepOutput, mlm_sums
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.objectives.masking import is_candidate


class Electric(CorruptingObjective):
    """The noise model and the energy."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the losses, added; the scales are of tokens that may be masked and of real tokens."""
        cloze_TH = self._cloze_states(batch).flatten(0, 1)
        candidate_BS = is_candidate(batch.ids_BS, self.special)
        cloze = self.predict(batch, cloze_TH, batch.ids_BS, candidate_BS.float())
        masking = self.mask(batch)
        sampled_BN = cloze.sampled_M.view_as(batch.ids_BS).gather(1, masking.position_BN)
        noised_BS, _ = self.replace(batch, masking, sampled_BN)
        label_BS = masking.slots_BS() > 0

        logit_BS = self.towers.discriminator_head.logits(self.read(batch, noised_BS)) + self._offset(
            cloze_TH, noised_BS
        )
        weight_BS = batch.layout.is_real_BS.to(logit_BS.dtype)
        losses_BS = F.binary_cross_entropy_with_logits(logit_BS, label_BS.to(logit_BS.dtype), reduction="none")
        rtd_loss_sum = (losses_BS * weight_BS).sum()
        loss = (
            self.objective.mlm_weight * batch.first_scale * cloze.loss_sum
            + self.objective.rtd_weight * batch.second_scale * rtd_loss_sum
        )
        called_BS = logit_BS > 0
        sums = {
            "rtd_loss_sum": rtd_loss_sum,
            "rtd_weight": weight_BS.sum(),
            "replaced": (label_BS * weight_BS).sum(),
            "replaced_correct": (label_BS * called_BS * weight_BS).sum(),
            "original": (~label_BS * weight_BS).sum(),
            "original_correct": (~label_BS * ~called_BS * weight_BS).sum(),
        }
        return self.output(batch, loss, mlm_sums(cloze) | sums, logit_BS, label_BS)

    def _cloze_states(self, batch: Batch) -> torch.Tensor:
        """Return [B, S, 2 H]: what the left tower knows before each token and the right one after it."""
        towers, example_BS = self.towers, batch.layout.example_BS
        S = example_BS.shape[1]
        later_SS = torch.ones(S, S, dtype=torch.bool, device=example_BS.device).triu(1)
        embedded, bias = towers.embed(batch.ids_BS, batch.layout), batch.scope
        assert isinstance(bias, torch.Tensor)  # `choose_attention` sees to it
        left = towers.generator(embedded, bias.masked_fill(later_SS, -torch.inf), self.noise(batch, GENERATOR))
        right = towers.generator_reverse(
            embedded, bias.masked_fill(later_SS.t(), -torch.inf), self.noise(batch, REVERSE)
        )
        together_BS1 = (example_BS[:, 1:] == example_BS[:, :-1])[..., None]  # of each token with the one after it
        before = F.pad(torch.where(together_BS1, left[:, :-1], 0.0), (0, 0, 1, 0))
        after = F.pad(torch.where(together_BS1, right[:, 1:], 0.0), (0, 0, 0, 1))
        return torch.cat([before, after], -1)

    @torch.no_grad()
    def _offset(self, cloze_TH: torch.Tensor, noised_BS: torch.Tensor) -> torch.Tensor:
        """Return [B, S]: log q of the tokens that stand there now, plus the log-odds of being noise at all."""
        head = self.towers.generator_head
        log_q_T, _ = token_log_probs(
            head.transform(cloze_TH),
            self.towers.embeddings.word.weight,
            head.bias,
            noised_BS.flatten(),
            head.vocab_size,
        )
        share = torch.tensor(self.objective.mask_prob, dtype=torch.float64)
        return log_q_T.view_as(noised_BS) + float(torch.logit(share))
