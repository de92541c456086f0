"""Score texts by a pretrained model: each token, and the whole text.

How: `token_scores.py` scores the tokens; the head with which the model was pretrained decides what
a score means. The score of a text is the sum over its tokens, as for minimal pairs. A text that is longer than the
rows of the training is cut into windows that overlap by half, and each token is scored in the window in which it is
farther from the ends. Rows are `[CLS] text [SEP]`. A masked language model needs a forward pass for each token.

Limits: the score of a long text is not that of a model that reads all of it at once. A sum of log-probabilities
prefers short texts; compare texts of about one length, or divide by the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from electra_dist.errors import UserError
from electra_dist.finetune.training_loop import Progress, quiet
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring.token_scores import build_token_scorer, predicts_tokens

_TOKENS_AT_ONCE = 16_384  # Tokens of the texts that are scored together, which bounds the memory.
_NUM_ENDS = 2  # [CLS] and [SEP]


@dataclass(frozen=True)
class TextScore:
    """Scores of one text: the natural log-probability of each token, and their sum.

    A token's log-probability is log P(the token is the original one) for replaced-token detection, and log p(token |
    all other tokens) for masked language models and, up to a constant for each token, for Electric.
    """

    text: str
    tokens: list[str]  # word-pieces, such as ["ele", "##ctra"]
    log_probs: list[float]  # one for each token
    replaced_probability: list[float] | None  # P(replaced) of each token; None if the model gives no such probability

    @property
    def score(self) -> float:
        """Return the sum of the log-probabilities; 0 for a text without tokens."""
        return math.fsum(self.log_probs)


class _Window(NamedTuple):
    """Tokens [start, end) that a model reads at once; the scores of [first, last) are used."""

    start: int
    end: int
    first: int
    last: int


class TextScorer:
    """Scorer that loads one model with its pretraining head to a device, and then scores any number of texts."""

    def __init__(self, encoder: Pretrained, device: torch.device) -> None:
        """Load the model; raise UserError if it has no pretraining head, or reads fewer than four tokens at once."""
        self._encoder = encoder
        self._score_rows = build_token_scorer(encoder, device)
        self._detects_replaced = not encoder.gives_energies and not (predicts_tokens(encoder) and encoder.reads_masks)
        longest_row = min(encoder.model.max_positions, encoder.trained_length or encoder.model.max_positions)
        self._window_tokens = longest_row - _NUM_ENDS
        if self._window_tokens < 2:
            raise UserError(
                f"{encoder.name}: the model reads {longest_row} tokens at once, but scores need at least "
                f"{_NUM_ENDS + 2}; use a model that was trained on longer rows"
            )

    def check_detects_replaced(self) -> None:
        """Raise UserError unless the model gives the probability that a token was replaced."""
        if not self._detects_replaced:
            raise UserError(
                f"{self._encoder.name}: the model gives no probability that a token was replaced, because it was "
                f"trained to predict masked tokens or to give energies; use a discriminator of replaced-token "
                f"detection, or scores"
            )

    def score(self, texts: Sequence[str], progress: Progress = quiet) -> Iterator[TextScore]:
        """Yield the scores of each text, in the order of `texts`; "[MASK]" in a text is plain text.

        `progress` is called with ("score", texts done, texts in total).
        """
        all_ids = self._encoder.tokenizer.encode(texts)
        num_done = 0
        while num_done < len(texts):
            end = _end_of_portion(all_ids, num_done)
            log_probs = self._token_log_probs(all_ids[num_done:end])
            for text, ids, log_prob_S in zip(texts[num_done:end], all_ids[num_done:end], log_probs, strict=True):
                yield self._text_score(text, ids, log_prob_S)
            num_done = end
            progress("score", num_done, len(texts))

    def _token_log_probs(self, ids_of_texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the log-probability of each token of each text; a long text is read in overlapping windows."""
        special = self._encoder.special
        rows = []
        windows_of_rows = []  # for each row, the number of its text, and its window
        for number, ids in enumerate(ids_of_texts):
            for window in cut_windows(len(ids), self._window_tokens):
                rows.append([special.cls, *ids[window.start : window.end], special.sep])
                windows_of_rows.append((number, window))
        log_probs = [torch.empty(len(ids)) for ids in ids_of_texts]
        for (number, window), value_S in zip(windows_of_rows, self._score_rows(rows, quiet), strict=True):
            scored = value_S[window.first - window.start : window.last - window.start]
            log_probs[number][window.first : window.last] = scored
        return log_probs

    def _text_score(self, text: str, ids: Sequence[int], log_prob_S: torch.Tensor) -> TextScore:
        replaced_probability = None
        if self._detects_replaced:
            replaced_probability = (-torch.expm1(log_prob_S.double())).tolist()
        return TextScore(
            text=text,
            tokens=[self._encoder.vocabulary.tokens[token_id] for token_id in ids],
            log_probs=log_prob_S.tolist(),
            replaced_probability=replaced_probability,
        )


def cut_windows(num_tokens: int, window_tokens: int) -> list[_Window]:
    """Cut a text of `num_tokens` into windows of at most `window_tokens` (at least 2), which score each token once.

    Each window begins half a window after the one before it; the last one ends with the text. Where two windows
    overlap, the first one scores the first half of the overlap, and the second one the rest.
    """
    if num_tokens == 0:
        return []
    if num_tokens <= window_tokens:
        return [_Window(start=0, end=num_tokens, first=0, last=num_tokens)]
    last_start = num_tokens - window_tokens
    starts = [*range(0, last_start, window_tokens // 2), last_start]
    windows = []
    first = 0
    for start, next_start in zip(starts, [*starts[1:], None]):
        end = start + window_tokens
        last = num_tokens if next_start is None else (next_start + end) // 2
        windows.append(_Window(start=start, end=end, first=first, last=last))
        first = last
    return windows


def _end_of_portion(all_ids: Sequence[Sequence[int]], begin: int) -> int:
    """Return the index after the last of the texts that are scored together, beginning with text `begin`.

    `all_ids` has the token ids of each text. Texts are scored together up to `_TOKENS_AT_ONCE` tokens, at least one.
    """
    num_tokens = 0
    for number in range(begin, len(all_ids)):
        num_tokens += len(all_ids[number])
        if num_tokens > _TOKENS_AT_ONCE and number > begin:
            return number
    return len(all_ids)
