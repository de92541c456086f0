"""Draws replacements from generators that no run trains: a frozen network, and fixed probabilities of tokens.

Fixed probabilities (`objective.generator: uniform` or `unigram`, and `objective.random_share`): token v is drawn with
probability weight_v / (sum of all weights), exact to 2**-31, as a function of (seed, step, row, slot) only, where a
slot is a place for one masked position of a row. With `disallow_correct` the original token is never drawn, and the
probabilities of the others keep their ratios. The range of a 32-bit random word is divided into one interval per
token, as long as its share of the weights. The drawn token is the one whose interval contains the word (one binary
search per slot). The ends of the intervals are an int64 buffer, which a cast of the module to bf16 leaves alone, and
which no checkpoint has to hold. With `uniform` all tokens of the vocabulary are drawn, special tokens included, as in
Google's code. With `unigram` (in the paper, but not in its code) [PAD], [CLS], [SEP] and [MASK] are never drawn.

A frozen generator (`objective.generator: frozen`) was trained before and learns no more (Fast-ELECTRA, Dong et al.,
ICLR 2024, arXiv 2310.07347). Its parameters are no parameters of the objective, so neither the optimizer, nor ZeRO,
nor a checkpoint has them. It runs its forward pass only, without gradients and dropout, in the dtype and on the device
of the towers. The objective keeps the module outside torch's registry of submodules, so moving or casting the
objective leaves it as it is; `placed_like` moves and casts it in the first forward pass under an engine. It costs a
forward pass in every step, and the weights once on every rank, whatever the ZeRO stage. `engine.compile` and
`engine.activation_checkpointing` leave this network as it is.

Shapes: B rows, N slots in every row, V tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.operation_types import SpecialIds
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.row_layout import RowLayout
from electra_dist.model.towers import new_embeddings, new_encoder, new_token_head

_RANGE = 1 << 32  # number of different 32-bit random words


class FrozenGenerator(nn.Module):
    """Generator that learns no more, with its own embeddings and head; submodules are named as in `ElectraTowers`."""

    def __init__(self, model: ModelConfig) -> None:
        """Create the modules in fp32 on the host, with weights of zero, which the caller overwrites."""
        super().__init__()
        width = model.generator_embedding_width
        # On the device "meta" torch's own initialisation costs nothing.
        with torch.device("meta"):
            self.embeddings = new_embeddings(model, width)
            self.generator = new_encoder(model, model.generator, width)
            self.generator_head = new_token_head(model, model.generator.hidden_size, width)
        self.requires_grad_(False)
        self.to_empty(device="cpu")
        for parameter in self.parameters():
            parameter.zero_()
        self.eval()

    def embed(self, ids_BS: torch.Tensor, layout: RowLayout, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the embeddings of masked rows, [B, S, E], from the generator's own tables, without dropout."""
        embedded: torch.Tensor = self.embeddings(
            ids_BS, layout.position_BS, layout.token_type_BS, dropout_keys=dropout_keys
        )
        return embedded

    def placed_like(self, ids_BS: torch.Tensor, dtype: torch.dtype) -> FrozenGenerator:
        """Move this module to the device of `ids_BS` and cast it to `dtype`, where needed; return this module."""
        table = self.embeddings.word.weight
        if table.device != ids_BS.device or table.dtype != dtype:
            self.to(ids_BS.device, dtype)
        return self


class FixedGenerator(nn.Module):
    """Generator that draws tokens with fixed probabilities, whatever the text is. It has no parameters."""

    purpose = Purpose.SAMPLE  # part of the key of the random draws

    ends_V: torch.Tensor  # int64: token v owns the random words from ends_V[v - 1] (0 for v = 0) below ends_V[v]

    def __init__(self, weight_V: np.ndarray, disallow_correct: bool) -> None:
        """Give each token a probability proportional to its weight; weights are at least 0 and need not sum to 1."""
        super().__init__()
        self.disallow_correct = disallow_correct
        cumulative_probability_V = np.cumsum(weight_V / weight_V.sum())
        ends = np.round(cumulative_probability_V * _RANGE).astype(np.int64)
        # Rounding may leave the last sum short of 1. Every word must fall into the interval of a token with a weight.
        last_token = np.flatnonzero(weight_V)[-1]
        ends[last_token:] = _RANGE
        self.register_buffer("ends_V", torch.from_numpy(ends), persistent=False)

    def forward(self, target_BN: torch.Tensor, row_B: torch.Tensor, step: int, seed: int) -> torch.Tensor:
        """Draw a token for each masked position, int64 [B, N]; `disallow_correct` excludes originals, `target_BN`."""
        word_BN = bits_grid(seed, self.purpose, step, row_B, target_BN.shape[1])
        if self.disallow_correct:
            word_BN = self._skip_original(word_BN, target_BN)
        # The first token whose interval ends above the word.
        return torch.searchsorted(self.ends_V, word_BN.contiguous(), right=True)

    def _skip_original(self, word_BN: torch.Tensor, target_BN: torch.Tensor) -> torch.Tensor:
        # The words are scaled down to a range that is shorter by the original token's interval [begin, end), and those
        # from `begin` on are moved behind it. The other tokens keep the ratios of their probabilities. Example: 8
        # words and the interval [2, 4) leave a range of 6. Word 2 is scaled to 2 * 6 / 8 = 1 (rounded down) and
        # stays; word 4 is scaled to 3 and becomes 5.
        end_BN = self.ends_V[target_BN]
        begin_BN = torch.where(target_BN > 0, self.ends_V[(target_BN - 1).clamp(min=0)], 0)
        length_BN = end_BN - begin_BN
        # word * (2**32 - length) / 2**32. The factor is halved, and the shift is 31 instead of 32, so that the product
        # fits into int64.
        half_range_BN = (_RANGE - length_BN) >> 1
        scaled_word_BN = (word_BN * half_range_BN) >> 31
        return scaled_word_BN + torch.where(scaled_word_BN >= begin_BN, length_BN, 0)


class RandomReplacements(FixedGenerator):
    """Generator with fixed probabilities. Its tokens take the place of some that a generator network has drawn."""

    purpose = Purpose.RANDOM_TOKEN

    def mix(
        self,
        sampled_BN: torch.Tensor,
        target_BN: torch.Tensor,
        share: float,
        row_B: torch.Tensor,
        step: int,
        seed: int,
    ) -> torch.Tensor:
        """Replace each sampled token with probability `share` by a random one, [B, N]; `target_BN` are originals."""
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
    """Return sampling weights `count_V ** (1 / temperature)`, float64 [V]; `special` and tokens of count 0 get 0."""
    weight_V = count_V.astype(np.float64) ** (1.0 / temperature)
    weight_V[count_V == 0] = 0.0
    weight_V[list(special)] = 0.0
    return weight_V
