"""Count the trigrams of a corpus, and predict each token from the two tokens before it.

Such a model knows short contexts only; beside its scores those of a neural model are read.

How: interpolated Kneser-Ney smoothing with one discount of 0.75 for all orders (Kneser and Ney, ICASSP 1995; Chen and
Goodman, 1999). A trigram gives its discount to the bigram of its last two tokens, which is counted by the number of
different tokens before it, and a bigram to the single token in the same way. Every token has half a count beyond its
own. [CLS] stands before the first token twice.

Cost: 8 bytes for each of the text's tokens while they are counted, then 24 bytes for each different trigram.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from electra_dist.finetune.training_loop import Ids, Progress, quiet

_DISCOUNT = 0.75
_UNSEEN = 0.5  # count that every token has beyond its own, so that none is impossible


class _Counts(NamedTuple):
    """Counts of token sequences, each sequence as one number (its key), sorted; both arrays are int64."""

    keys: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, weights: np.ndarray | None = None) -> _Counts:
        """Count equal keys or, if `weights` are given, add up the weights of equal keys."""
        unique, inverse = np.unique(keys, return_inverse=True)
        return cls(unique, np.bincount(inverse, weights, len(unique)).astype(np.int64))

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the count of each key, 0 for a key that was not counted."""
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.counts[index], 0)


class _Order(NamedTuple):
    """Counts of the n-grams of one length, and of their contexts (all but the last token)."""

    sequences: _Counts  # of each n-gram
    contexts: _Counts  # of each context, which is an n-gram without its last token
    followers: _Counts  # of the different tokens that come after each context

    @classmethod
    def of(cls, sequences: _Counts, vocab_size: int) -> _Order:
        contexts = sequences.keys // vocab_size
        return cls(sequences, _Counts.of(contexts, sequences.counts), _Counts.of(contexts))

    def probability(self, sequence: np.ndarray, context: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return the probability of each n-gram's last token after the tokens before it, by absolute discounting.

        `sequence` has the keys of the n-grams, `context` those of the n-grams without the last token. Every count is
        lowered by `_DISCOUNT`; what this takes away in a context is distributed in proportion to `lower`, the
        probabilities by shorter n-grams. For a context that was never seen, `lower` itself is returned.
        """
        discounted = np.maximum(self.sequences.find(sequence) - _DISCOUNT, 0.0)
        taken_away = _DISCOUNT * self.followers.find(context)  # once for each different token after the context
        num_in_context = self.contexts.find(context)
        return np.where(num_in_context > 0, (discounted + taken_away * lower) / np.maximum(num_in_context, 1), lower)


class TrigramModel:
    """Trigram model of token ids, which must be below `vocab_size`, at most 2^20."""

    def __init__(self, rows: Iterable[np.ndarray], vocab_size: int, cls: int, pad: int) -> None:
        """Count the trigrams in blocks of rows of token ids, [rows, S], which begin with `cls` and end with `pad`."""
        assert vocab_size <= 1 << 20, "three ids must fit into 63 bits"
        self._vocab_size = vocab_size
        self._cls = cls
        self.token_counts = np.zeros(vocab_size, np.int64)  # of single tokens, without padding
        keys = []
        for block_RS in rows:
            block_RS = block_RS.astype(np.int64)
            self.token_counts += np.bincount(block_RS[block_RS != pad], minlength=vocab_size)
            before_RS = np.concatenate([np.full((len(block_RS), 1), cls), block_RS], 1)
            key_RS = self._key(before_RS[:, :-2], before_RS[:, 1:-1], before_RS[:, 2:])
            keys.append(key_RS[before_RS[:, 2:] != pad])
        trigrams = _Counts.of(np.concatenate(keys))
        bigrams = _Counts.of(trigrams.keys % vocab_size**2)  # counted by the different tokens before them
        self._trigram = _Order.of(trigrams, vocab_size)
        self._bigram = _Order.of(bigrams, vocab_size)
        share_V = np.bincount(bigrams.keys % vocab_size, minlength=vocab_size) + _UNSEEN
        self._share_V = share_V / share_V.sum()

    def _key(self, first: np.ndarray, second: np.ndarray, third: np.ndarray) -> np.ndarray:
        return (first * self._vocab_size + second) * self._vocab_size + third

    def log_probs(self, row: Sequence[int]) -> torch.Tensor:
        """Return log p(token | the two tokens before it) of all tokens of a row except the first, fp32 [S - 1]."""
        ids = np.array([self._cls, *row], np.int64)
        trigram = self._key(ids[:-2], ids[1:-1], ids[2:])
        bigram = trigram % self._vocab_size**2
        by_bigram = self._bigram.probability(bigram, ids[1:-1], self._share_V[ids[2:]])
        probability = self._trigram.probability(trigram, trigram // self._vocab_size, by_bigram)
        return torch.from_numpy(np.log(probability)).float()

    def score(self, ids: Ids, progress: Progress = quiet) -> list[torch.Tensor]:
        """Return for each row log p(token | the two tokens before it) of its tokens but [CLS] and the last [SEP].

        A row of S token ids gives a tensor fp32 [S - 2]. `progress` is called after each row.
        """
        values = []
        for number, row in enumerate(ids, start=1):
            values.append(self.log_probs(row)[:-1])
            progress("score by trigrams", number, len(ids))
        return values

    def divergence_of(self, rows: Iterable[np.ndarray], pad: int) -> float:
        """Return how much the tokens of other `rows` differ from those of the model's text, in nats.

        This is the Kullback-Leibler divergence of their frequencies, 0 if these are equal. In the model's text, every
        token counts half a time more, so that none is impossible.
        """
        other_V = np.zeros(self._vocab_size)
        for block_RS in rows:
            other_V += np.bincount(block_RS[block_RS != pad], minlength=self._vocab_size)
        other_V /= other_V.sum()
        text_V = self.token_counts + _UNSEEN
        text_V /= text_V.sum()
        is_used = other_V > 0
        return float((other_V[is_used] * np.log(other_V[is_used] / text_V[is_used])).sum())
