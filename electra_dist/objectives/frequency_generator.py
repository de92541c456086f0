"""Draws replacements without a network: uniformly, or as often as tokens occur in the corpus.

Guarantee: token v is drawn with probability weight_v / (sum of all weights), exact to 2**-31, as a function of (seed,
step, row, slot) only, where a slot is a place for one masked position of a row. With `disallow_correct` the original
token is never drawn, and the probabilities of the others keep their ratios.

How: the range of a 32-bit random word is divided into one interval per token, whose length is in proportion to the
token's weight. The drawn token is the one whose interval contains the word (inverse CDF, one binary search per slot).
The ends of the intervals are an int64 buffer, so casting the module to bf16 does not change them. No checkpoint holds
the buffer, because it follows from the config and the corpus.

With `objective.generator: uniform` all tokens of the vocabulary are drawn, special tokens included, as in Google's
code. With `unigram` (in the paper, but not in its code) the weights are `count ** (1 / temperature)`, and [PAD],
[CLS], [SEP] and [MASK] are never drawn.

`RandomReplacements` puts such draws in place of some samples of a generator network (`objective.random_share`). Its
random numbers have a purpose of their own, and its uniform draws leave out the special tokens.

Shapes: B rows, N slots in every row, V tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from torch import nn

from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.scheduled_values import Scalar

_RANGE = 1 << 32  # number of different 32-bit random words


class FixedGenerator(nn.Module):
    """Generator that draws tokens with fixed probabilities, whatever the text is. It has no parameters."""

    purpose = Purpose.SAMPLE  # keys the draws

    ends_V: torch.Tensor  # int64: token v owns the random words from ends_V[v - 1] (0 for v = 0) below ends_V[v]

    def __init__(self, weight_V: np.ndarray, disallow_correct: bool) -> None:
        """Divide the range of a 32-bit random word into one interval per token, in proportion to the weights."""
        super().__init__()
        self.disallow_correct = disallow_correct
        cumulative_probability_V = np.cumsum(weight_V / weight_V.sum())
        ends = np.round(cumulative_probability_V * _RANGE).astype(np.int64)
        # Rounding may leave the last sum short of 1. Every word must fall into the interval of a token with a weight.
        last_token = np.flatnonzero(weight_V)[-1]
        ends[last_token:] = _RANGE
        self.register_buffer("ends_V", torch.from_numpy(ends), persistent=False)

    def forward(
        self, target_BN: torch.Tensor, row_B: torch.Tensor, step: int | torch.Tensor, seed: int
    ) -> torch.Tensor:
        """Return a drawn token for each of the N slots (places for masked tokens) of every row, int64 [B, N]."""
        word_BN = bits_grid(seed, self.purpose, step, row_B, target_BN.shape[1])
        if self.disallow_correct:
            word_BN = self._skip_original(word_BN, target_BN)
        # The first token whose interval ends above the word.
        return torch.searchsorted(self.ends_V, word_BN.contiguous(), right=True)

    def _skip_original(self, word_BN: torch.Tensor, target_BN: torch.Tensor) -> torch.Tensor:
        """Return random words that never select the original token, int64 [B, N], computed from `word_BN`."""
        end_BN = self.ends_V[target_BN]
        begin_BN = torch.where(target_BN > 0, self.ends_V[(target_BN - 1).clamp(min=0)], 0)
        length_BN = end_BN - begin_BN
        # word * (2**32 - length) / 2**32. The factor is halved, and the shift is 31 instead of 32, so that the product
        # fits into int64.
        half_range_BN = (_RANGE - length_BN) >> 1
        scaled_word_BN = (word_BN * half_range_BN) >> 31
        return scaled_word_BN + torch.where(scaled_word_BN >= begin_BN, length_BN, 0)


class RandomReplacements(FixedGenerator):
    """Generator with fixed probabilities whose tokens replace some of the samples of a generator network."""

    purpose = Purpose.RANDOM_TOKEN

    def mix(
        self,
        sampled_BN: torch.Tensor,
        target_BN: torch.Tensor,
        share: Scalar,
        row_B: torch.Tensor,
        step: int | torch.Tensor,
        seed: int,
    ) -> torch.Tensor:
        """Return the tokens that replace the masked ones, int64 [B, N]: samples of the generator, and random tokens.

        Args:
            share: probability of a random token, in [0, 1].
            step: number of the optimizer step, or int64 [1] that holds it on the device of the ids.
        """
        word_BN = bits_grid(seed, Purpose.RANDOM_SHARE, step, row_B, sampled_BN.shape[1])
        is_random_BN = word_BN.double() < share * float(_RANGE)
        return torch.where(is_random_BN, self(target_BN, row_B, step, seed), sampled_BN)


def uniform_weights(vocab_size: int) -> np.ndarray:
    """Return weights with which a `FixedGenerator` draws all tokens equally often: ones, float64 [vocab_size]."""
    return np.ones(vocab_size)


def ordinary_weights(vocab_size: int, special: SpecialIds) -> np.ndarray:
    """Return sampling weights, float64 [vocab_size]: 1 for each ordinary token, and 0 for the five special tokens."""
    weight_V = np.ones(vocab_size)
    weight_V[list(special)] = 0.0
    return weight_V


def unigram_weights(count_V: np.ndarray, special: tuple[int, ...], temperature: float) -> np.ndarray:
    """Return weights of a `FixedGenerator` that follow the corpus: `count_V ** (1 / temperature)`, float64 [V]."""
    weight_V = count_V.astype(np.float64) ** (1.0 / temperature)
    weight_V[count_V == 0] = 0.0
    weight_V[list(special)] = 0.0
    return weight_V
