"""Replacements without a network: any token alike, or tokens as often as they are in the corpus.

Guarantee: token v is drawn with probability weight_v / total, exact to 2**-31, as a function of (seed, step, row,
slot) and of nothing else. With `disallow_correct` the true token's share is left out, exactly.

How: weights become whole 32-bit shares of the range of a random word; a word falls into one token's interval (inverse
CDF, one binary search a slot). The intervals are a buffer of int64 that no cast to bf16 touches and no checkpoint
holds: it follows from the config and the corpus.

`uniform` draws from the whole vocabulary, special tokens included, as Google's code does. `unigram` (the paper's, not
in its code) draws by `count ** (1 / temperature)`; [PAD], [CLS], [SEP] and [MASK] have no share.

Shapes: B rows, N slots a row, V tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from torch import nn

_RANGE = 1 << 32


class FixedGenerator(nn.Module):
    """Draws tokens by fixed weights."""

    ends_V: torch.Tensor

    def __init__(self, weight_V: np.ndarray, disallow_correct: bool) -> None:
        """Turn weights into intervals of a random word.

        Args:
            weight_V: non-negative; not all zero.
            disallow_correct: never draw a slot's true token.
        """
        super().__init__()
        self.disallow_correct = disallow_correct
        ends = np.round(np.cumsum(weight_V / weight_V.sum()) * _RANGE).astype(np.int64)
        ends[np.flatnonzero(weight_V)[-1] :] = _RANGE  # whatever the sum was rounded to
        self.register_buffer("ends_V", torch.from_numpy(ends), persistent=False)

    def forward(self, target_BN: torch.Tensor, row_B: torch.Tensor, step: int, seed: int) -> torch.Tensor:
        """Return int64 [B, N] tokens for slots.

        Args:
            target_BN: int64 true tokens of the slots.
            row_B: int64 numbers of the rows within the step's global batch.
            step: number of the optimizer step.
            seed: the run's.
        """
        word_BN = bits_grid(seed, Purpose.SAMPLE, step, row_B, target_BN.shape[1])
        if self.disallow_correct:
            end_BN = self.ends_V[target_BN]
            begin_BN = torch.where(target_BN > 0, self.ends_V[(target_BN - 1).clamp(min=0)], 0)
            share_BN = end_BN - begin_BN
            word_BN = (word_BN * ((_RANGE - share_BN) >> 1)) >> 31  # half the product fits into int64
            word_BN = word_BN + torch.where(word_BN >= begin_BN, share_BN, 0)
        return torch.searchsorted(self.ends_V, word_BN.contiguous(), right=True)


def uniform_weights(vocab_size: int) -> np.ndarray:
    """Return float64 [V]: 1 for every token of the vocabulary."""
    return np.ones(vocab_size)


def unigram_weights(count_V: np.ndarray, special: tuple[int, ...], temperature: float) -> np.ndarray:
    """Return float64 [V]: `count_V ** (1 / temperature)`, 0 for the ids in `special`."""
    weight_V = count_V.astype(np.float64) ** (1.0 / temperature)
    weight_V[(count_V == 0)] = 0.0
    weight_V[list(special)] = 0.0
    return weight_V
