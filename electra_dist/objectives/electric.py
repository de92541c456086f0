"""Implements Electric: an energy-based cloze model, trained against a noise distribution (Clark et al., EMNLP 2020).

    q(x_t | all other tokens)   the noise model: two causal networks, one from each side. The state left of t and
                                the state right of t are concatenated and go through the token head. Trained by -log q
                                at every token that may be masked.
    noised text                 masked positions hold tokens drawn from q. Each has label 1, even if it is the
                                original token.
    logit_t = E(x)_t + log q(x_t) + log(p / (1 - p)),   p = mask_prob

The discriminator's output E(x)_t is an energy: -E(x)_t learns the log-probability of x_t up to a constant, so one pass
scores a whole text. q reads the original text, not the noised one, and gets no gradient through the logit.

Attention and neighbours stay inside an example. The first token of an example has no left neighbour and the last one
no right neighbour; zeros take the place of their states.

Cost: a softmax over the vocabulary at every position, twice (the second time for log q of the noised text).

Shapes: B rows, S tokens, H width of one network of the noise model, T = B * S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import rtd_loss_of_logits
from electra_kernels.slots import is_candidate, replace_and_label
from typing_extensions import override

from electra_dist.model.attention import SdpaMask
from electra_dist.model.heads import token_log_probs
from electra_dist.objectives.base import GENERATOR, REVERSE, Batch, StepOutput, mlm_sums, rtd_sums
from electra_dist.objectives.corruption import CorruptingObjective


class Electric(CorruptingObjective):
    """Objective Electric: two causal networks model the noise, and the discriminator learns energies of tokens."""

    @override
    def loss_counts(self, ids_BS: torch.Tensor, mask_prob: float | None = None) -> torch.Tensor:
        num_candidates_B = is_candidate(ids_BS, self.special).sum(1)  # the noise model predicts all that may be masked
        return torch.stack([num_candidates_B, (ids_BS != self.special.pad).sum(1)], -1)

    @override
    def compute_loss(self, batch: Batch) -> StepOutput:
        # The noise model predicts, and samples, a token at every position.
        cloze_TH = self._cloze_states(batch).flatten(0, 1)
        candidate_BS = is_candidate(batch.ids_BS, self.special)
        weight_BS = candidate_BS.float()
        cloze = self.predict(batch, cloze_TH, batch.ids_BS, weight_BS)
        cloze_sums = mlm_sums(cloze) | self.entropy_sums(batch, cloze_TH, weight_BS)

        # The samples at the masked positions replace the tokens there. All of them have label 1, even a sample that
        # equals the original token.
        masking = self.mask(batch)
        sampled_BN = cloze.sampled_M.view_as(batch.ids_BS).gather(1, masking.position_BN)
        noised_BS, _ = replace_and_label(
            batch.ids_BS, masking.position_BN, masking.weight_BN, sampled_BN, backend=self.backend
        )
        label_BS = masking.slots_BS() > 0

        energy_BS = self.towers.discriminator_head.logits(self.read(batch, noised_BS))
        logit_BS = energy_BS + self._offset(cloze_TH, noised_BS, batch.values.mask_prob)
        rtd = rtd_loss_of_logits(logit_BS, label_BS, batch.layout.is_real_BS)
        noise_loss = batch.values.mlm_weight * batch.first_scale * cloze.loss_sum
        loss = noise_loss + batch.values.rtd_weight * batch.second_scale * rtd.loss_sum
        return self.output(batch, loss, cloze_sums | rtd_sums(rtd), logit_BS, label_BS, noised_BS)

    def _cloze_states(self, batch: Batch) -> torch.Tensor:
        """Return two states of each token, one for the text to its left and one for that to its right, [B, S, 2 H]."""
        towers = self.towers
        example_BS = batch.layout.example_BS
        S = example_BS.shape[1]
        left_keys = self.dropout_keys(batch, GENERATOR)
        embedded_BSE = towers.embeddings(batch.ids_BS, batch.layout, left_keys)

        # The left-to-right network attends to a token and those before it, the other to a token and those after it.
        assert isinstance(batch.attention_mask, SdpaMask)  # `choose_attention` takes no other for this objective
        bias_B1SS = batch.attention_mask.bias_B1SS
        key_is_later_SS = torch.ones(S, S, dtype=torch.bool, device=example_BS.device).triu(1)
        key_is_earlier_SS = key_is_later_SS.t()
        left_mask = SdpaMask(bias_B1SS.masked_fill(key_is_later_SS, -torch.inf))
        right_mask = SdpaMask(bias_B1SS.masked_fill(key_is_earlier_SS, -torch.inf))
        left_BSH = towers.generator(embedded_BSE, left_mask, left_keys)
        right_BSH = towers.generator_reverse(embedded_BSE, right_mask, self.dropout_keys(batch, REVERSE))

        # Shift the states by one token: token t gets the left state of t - 1 and the right state of t + 1, and zeros
        # where that neighbour is missing or in another example. These tensors are over the S - 1 pairs of neighbours.
        pair_in_one_example = (example_BS[:, 1:] == example_BS[:, :-1])[..., None]
        left_of_pairs = torch.where(pair_in_one_example, left_BSH[:, :-1], 0.0)
        right_of_pairs = torch.where(pair_in_one_example, right_BSH[:, 1:], 0.0)
        before_BSH = F.pad(left_of_pairs, (0, 0, 1, 0))  # zeros for the first token
        after_BSH = F.pad(right_of_pairs, (0, 0, 0, 1))  # zeros for the last token
        return torch.cat([before_BSH, after_BSH], -1)

    @torch.no_grad()
    def _offset(self, cloze_TH: torch.Tensor, noised_BS: torch.Tensor, mask_prob: float) -> torch.Tensor:
        """Return log q(token) + log(p / (1 - p)), [B, S], q being the noise model and p the share of masked tokens."""
        head = self.towers.generator_head
        log_q_T, _ = token_log_probs(
            head.transform(cloze_TH),
            self.towers.embeddings.word.weight,
            head.bias,
            noised_BS.flatten(),
            head.vocab_size,
        )
        log_odds_of_noise = float(torch.logit(torch.tensor(mask_prob, dtype=torch.float64)))  # log(p / (1 - p))
        return log_q_T.view_as(noised_BS) + log_odds_of_noise
