"""Implements Electric: an energy-based cloze model, trained against a noise distribution (Clark et al., EMNLP 2020).

    q(x_t | all other tokens)   the noise model: two causal towers, one reading from each side. The state left of t and
                                the state right of t are concatenated and go through the token head. Trained by -log q
                                at every token that may be masked.
    noised text                 masked positions hold samples from q. Each of them has label 1, even if the sample is
                                the original token.
    logit_t = E(x)_t + log q(x_t) + log(p / (1 - p)),   p = mask_prob

The discriminator's output E(x)_t is an energy: -E(x)_t learns the log-probability of x_t up to a constant, so one pass
scores a whole text. q reads the original text, not the noised one, and gets no gradient through the logit.

Attention and neighbours stay inside an example. The first token of an example has no left neighbour and the last one
no right neighbour; zeros take the place of their states.

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
    """The objective Electric: two causal towers model the noise, and the discriminator learns energies."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the sum of the noise model's cloze loss and the discriminator's loss, each scaled and weighted.

        `batch.first_scale` must be 1 / (number of tokens that may be masked) and `batch.second_scale` 1 / (number of
        real tokens); `loss_counts` returns these numbers.
        """
        cloze_TH = self._cloze_states(batch).flatten(0, 1)
        candidate_BS = is_candidate(batch.ids_BS, self.special)
        cloze = self.predict(batch, cloze_TH, batch.ids_BS, candidate_BS.float())
        masking = self.mask(batch)
        sampled_BN = cloze.sampled_M.view_as(batch.ids_BS).gather(1, masking.position_BN)
        noised_BS, _ = self.replace(batch, masking, sampled_BN)
        label_BS = masking.slots_BS() > 0

        energy_BS = self.towers.discriminator_head.logits(self.read(batch, noised_BS))
        logit_BS = energy_BS + self._offset(cloze_TH, noised_BS)
        weight_BS = batch.layout.is_real_BS.to(logit_BS.dtype)
        losses_BS = F.binary_cross_entropy_with_logits(logit_BS, label_BS.to(logit_BS.dtype), reduction="none")
        rtd_loss_sum = (losses_BS * weight_BS).sum()
        loss = (
            self.objective.mlm_weight * batch.first_scale * cloze.loss_sum
            + self.objective.rtd_weight * batch.second_scale * rtd_loss_sum
        )
        detected_BS = logit_BS > 0
        sums = {
            "rtd_loss_sum": rtd_loss_sum,
            "rtd_weight": weight_BS.sum(),
            "replaced": (label_BS * weight_BS).sum(),
            "replaced_correct": (label_BS * detected_BS * weight_BS).sum(),
            "original": (~label_BS * weight_BS).sum(),
            "original_correct": (~label_BS * ~detected_BS * weight_BS).sum(),
        }
        return self.output(batch, loss, mlm_sums(cloze) | sums, logit_BS, label_BS)

    def _cloze_states(self, batch: Batch) -> torch.Tensor:
        """Return the noise model's state of each token, from its context on both sides, [B, S, 2 H].

        The first half is the left-to-right tower's state of the token before it, the second half the right-to-left
        tower's state of the token after it. A half is zero where the example has no token on that side.
        """
        towers = self.towers
        example_BS = batch.layout.example_BS
        S = example_BS.shape[1]
        later_SS = torch.ones(S, S, dtype=torch.bool, device=example_BS.device).triu(1)
        embedded = towers.embed(batch.ids_BS, batch.layout)
        bias = batch.attention_mask
        assert isinstance(bias, torch.Tensor)  # `choose_attention` never takes flex for this objective
        # The left tower sees a token and those before it, the right tower a token and those after it.
        left_bias = bias.masked_fill(later_SS, -torch.inf)
        right_bias = bias.masked_fill(later_SS.t(), -torch.inf)
        left = towers.generator(embedded, left_bias, self.dropout_keys(batch, GENERATOR))
        right = towers.generator_reverse(embedded, right_bias, self.dropout_keys(batch, REVERSE))
        # Whether each token but the last is in the same example as the token after it.
        together_BS1 = (example_BS[:, 1:] == example_BS[:, :-1])[..., None]
        before = F.pad(torch.where(together_BS1, left[:, :-1], 0.0), (0, 0, 1, 0))
        after = F.pad(torch.where(together_BS1, right[:, 1:], 0.0), (0, 0, 0, 1))
        return torch.cat([before, after], -1)

    @torch.no_grad()
    def _offset(self, cloze_TH: torch.Tensor, noised_BS: torch.Tensor) -> torch.Tensor:
        """Return the offset of the discriminator's logits, log q(x_t) + log(p / (1 - p)), [B, S], without gradient.

        In this formula, q is the noise model's probability of the token in the noised text, and p is `mask_prob`.

        Args:
            cloze_TH: states of the cloze model, from `_cloze_states`.
            noised_BS: int64 ids of the noised text.
        """
        head = self.towers.generator_head
        log_q_T, _ = token_log_probs(
            head.transform(cloze_TH),
            self.towers.embeddings.word.weight,
            head.bias,
            noised_BS.flatten(),
            head.vocab_size,
        )
        noise_probability = torch.tensor(self.objective.mask_prob, dtype=torch.float64)
        return log_q_T.view_as(noised_BS) + float(torch.logit(noise_probability))
