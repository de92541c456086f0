"""Measure minimal-pair accuracy: how often a model prefers the grammatical sentence of a pair.

The pairs are those of `number_agreement.py`, such as "the boy is tired" and "the boy are tired", or those of files,
such as BLiMP's, which `pair_files.py` reads. The grammatical sentence must score strictly higher; a tie counts as a
miss. Nothing is trained, so the result describes the model as it came from pretraining. Chance is 50 %.

How: the score of a sentence depends on the head with which the encoder was pretrained; `token_scores.py` computes it.
- A masked language model: the pseudo-log-likelihood of the sentence, with each token masked in turn. On pairs of
  files, the readout "word" masks the rest of the token's word, too; "token" masks the token alone.
- A discriminator, or a model that restores replaced tokens: on pairs of files, the sum over all tokens of the sentence
  of log P(this token is the original one). On pairs of `number_agreement.py`, whose sentences differ in one word, the
  logit or the log-probability of that word alone.
- The discriminator of Electric: the same with minus its energies in place of log P.

A standard error is that of the choice of pairs: sqrt(p (1 - p) / n) for n pairs of one kind, and over all pairs the
same with the kinds as strata.

Cost: 200 pairs of each of six phenomena are 2,400 short sentences for a discriminator and some 15,000 for an MLM. All
67,000 pairs of BLiMP are 134,000 sentences for a discriminator, and about ten times as many for an MLM.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from electra_dist.errors import UserError
from electra_dist.finetune.training_loop import Progress, quiet
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring.number_agreement import TEMPLATES, Pair, make_pairs
from electra_dist.scoring.pair_files import SentencePair
from electra_dist.scoring.token_scores import (
    TokenScorer,
    predicts_tokens,
    pseudo_log_likelihoods,
    replaced_logits,
    row_sums,
    score_places,
    sentence_log_probs,
)

ALL = "all"  # name of the score over all phenomena

Readout = Literal["token", "word"]  # what a masked language model does not see when it scores a token of a word


class PairScore(NamedTuple):
    """Accuracy, a fraction, on the pairs of one phenomenon (such as subject-verb agreement), or on `ALL` pairs."""

    phenomenon: str
    pairs: int  # number of pairs
    accuracy: float
    example: str  # a sentence with both forms, as in "the boy is/*are tired ."; empty for `ALL`
    standard_error: float  # of the accuracy, over the choice of pairs
    margin: float  # mean over the pairs of the grammatical sentence's score minus the other's, in nats
    hits: tuple[bool, ...]  # for each pair, whether the grammatical sentence scores higher; empty for `ALL`
    # Accuracy by each readout, for a masked language model on pairs of files; otherwise empty.
    accuracy_by_readout: dict[str, float]


def score_minimal_pairs(
    encoder: Pretrained, num_pairs: int, device: torch.device, progress: Progress = quiet
) -> list[PairScore]:
    """Return how often an encoder prefers the grammatical sentence of pairs made by `number_agreement.make_pairs`.

    `num_pairs` are made for each phenomenon (kind of agreement), or fewer if the vocabulary is small. There is one
    score for each phenomenon with at least one pair, then one for all pairs, named `ALL`. Raises UserError if the
    model has no pretraining head, or if its vocabulary lacks the words to form any pair.
    """
    pairs_of = make_pairs(_SingleTokens(encoder), num_pairs)  # phenomenon -> its pairs
    all_pairs = [pair for phenomenon_pairs in pairs_of.values() for pair in phenomenon_pairs]
    if not all_pairs:
        raise UserError(
            f"{encoder.name}: the vocabulary has too few of the templates' English words to form a sentence pair; "
            f"use a model with an English vocabulary"
        )
    scores = _sentence_scores(encoder, all_pairs, device, progress)
    phenomena = [name for name, pairs in pairs_of.items() for _ in pairs]
    examples = {name: _example(pairs[0]) for name, pairs in pairs_of.items() if pairs}
    return _pair_scores(phenomena, scores, examples)


def score_sentence_pairs(
    encoder: Pretrained,
    pairs: Sequence[SentencePair],
    device: torch.device,
    progress: Progress = quiet,
    readout: Readout = "token",
    scorer: TokenScorer | None = None,
) -> list[PairScore]:
    """Return how often an encoder prefers the grammatical sentence of given pairs (at least one), such as BLiMP's.

    There is one score for each kind of pair, in the order in which the kinds first occur, then one for all pairs,
    named `ALL`. `readout` has an effect on masked language models only. `scorer` scores the tokens in place of
    the encoder, whose tokenizer is used. Raises UserError if the model has no pretraining head, or if a sentence has
    more tokens than the model has positions.
    """
    ids = _encode_sentences(encoder, pairs)
    examples: dict[str, str] = {}
    for pair in pairs:
        examples.setdefault(pair.kind, f"{pair.good} / *{pair.bad}")
    kinds = [pair.kind for pair in pairs]
    if scorer is not None:
        return _pair_scores(kinds, row_sums(scorer(ids, progress)), examples)
    if not (predicts_tokens(encoder) and encoder.reads_masks):
        return _pair_scores(kinds, sentence_log_probs(encoder, ids, device, progress), examples)
    continues_word = encoder.tokenizer.continues_word(_sentences(pairs))
    token_sums, word_sums = pseudo_log_likelihoods(encoder, ids, continues_word, device, progress)
    scores_by_token = _pair_scores(kinds, token_sums, examples)
    scores_by_word = _pair_scores(kinds, word_sums, examples)
    scores = []
    for by_token, by_word in zip(scores_by_token, scores_by_word, strict=True):
        chosen = by_word if readout == "word" else by_token
        accuracies = {"token": by_token.accuracy, "word": by_word.accuracy}
        scores.append(chosen._replace(accuracy_by_readout=accuracies))
    return scores


def remarks_on_pairs(encoder: Pretrained, pairs: Sequence[SentencePair]) -> list[str]:
    """Return a line if both sentences of some pairs have the same tokens, for example because case is dropped."""
    rows = _encode_sentences(encoder, pairs)
    equal = [pair for pair, good, bad in zip(pairs, rows[0::2], rows[1::2], strict=True) if good == bad]
    if not equal:
        return []
    return [
        f"{encoder.name}: both sentences of {len(equal):,} of {len(pairs):,} pairs have the same tokens, and count as "
        f"wrong; first: {equal[0].good} / {equal[0].bad}"
    ]


def remarks_on_kinds(encoder: Pretrained, scores: Sequence[PairScore]) -> list[str]:
    """Return a line that names the kinds of `make_pairs` without a score, because the vocabulary lacks their words."""
    missing = [kind for kind in TEMPLATES if kind not in {score.phenomenon for score in scores}]
    if not missing:
        return []
    return [
        f"{encoder.name}: left out, because the vocabulary lacks the words of their sentences: {', '.join(missing)}"
    ]


class _SingleTokens:
    """Container of all words that are a single token of a model, both at the beginning of a text and after a space."""

    def __init__(self, encoder: Pretrained) -> None:
        self._encoder = encoder
        self._is_single: dict[object, bool] = {}  # the words that were looked up before

    def __contains__(self, word: object) -> bool:
        if word not in self._is_single:
            ids_of_words = self._encoder.tokenizer.encode_words([str(word), str(word)])
            is_known = [self._encoder.special.unk] not in ids_of_words
            self._is_single[word] = is_known and all(len(ids) == 1 for ids in ids_of_words)
        return self._is_single[word]


def _sentence_scores(
    encoder: Pretrained, pairs: Sequence[Pair], device: torch.device, progress: Progress
) -> torch.Tensor:
    """Score both sentences of each pair, fp32 [2 * pairs], first the grammatical one; plausible ones score high."""
    special = encoder.special
    ids = []
    positions = []  # for each row, the index of the word that differs
    for pair in pairs:
        for sentence in (pair.good, pair.bad):
            word_ids = encoder.tokenizer.encode_words(sentence)  # one id for each word
            ids.append([special.cls, *itertools.chain.from_iterable(word_ids), special.sep])
            positions.append(1 + pair.position)  # [CLS] shifts every word by one

    if not predicts_tokens(encoder):
        return -replaced_logits(encoder, ids, positions, device, progress)
    if encoder.reads_masks:
        return sentence_log_probs(encoder, ids, device, progress)
    # Replace MLM or All-Tokens MLM: the model never saw [MASK] in training, so it reads the sentence as it stands.
    return score_places(encoder, ids, list(enumerate(positions)), device, progress)


def _example(pair: Pair) -> str:
    """Format a pair as one sentence with a star at the ungrammatical form, as in "the boy is/*are tired ."."""
    position = pair.position
    words = list(pair.good)
    words[position] = f"{pair.good[position]}/*{pair.bad[position]}"
    return " ".join(words)


def _sentences(pairs: Sequence[SentencePair]) -> list[str]:
    return list(itertools.chain.from_iterable((pair.good, pair.bad) for pair in pairs))


def _encode_sentences(encoder: Pretrained, pairs: Sequence[SentencePair]) -> list[list[int]]:
    """Return two rows of token ids for each pair: the grammatical sentence, then the ungrammatical one."""
    special = encoder.special
    sentences = _sentences(pairs)
    rows = []
    for sentence, token_ids in zip(sentences, encoder.tokenizer.encode(sentences), strict=True):
        row = [special.cls, *token_ids, special.sep]
        if len(row) > encoder.model.max_positions:
            raise UserError(
                f"{encoder.name}: a sentence has {len(row)} tokens, but the model has {encoder.model.max_positions} "
                f"positions: `{sentence}`; remove its pair from the file"
            )
        rows.append(row)
    return rows


def _pair_scores(kinds: Sequence[str], scores: torch.Tensor, examples: dict[str, str]) -> list[PairScore]:
    """Return for each kind of pair, then for all, how often the grammatical sentence has the higher score.

    `kinds` has the kind of each pair. `scores` has two numbers for each: first the grammatical sentence's. `examples`
    maps each kind to one of its pairs as text.
    """
    margins = (scores[0::2].double() - scores[1::2].double()).tolist()
    margins_of: dict[str, list[float]] = {kind: [] for kind in examples}
    for kind, margin in zip(kinds, margins, strict=True):
        margins_of[kind].append(margin)

    results = []
    variance_of_hits = 0.0  # of the number of hits among all pairs, with the kinds as strata
    for kind, margins_of_kind in margins_of.items():
        score = _score_of_margins(kind, margins_of_kind, examples[kind])
        variance_of_hits += score.accuracy * (1.0 - score.accuracy) * score.pairs
        results.append(score)
    total = _score_of_margins(ALL, margins, example="")
    results.append(total._replace(standard_error=math.sqrt(variance_of_hits) / total.pairs, hits=()))
    return results


def _score_of_margins(phenomenon: str, margins: Sequence[float], example: str) -> PairScore:
    """Sum up the margins of some pairs; the standard error is that of pairs of one kind."""
    hits = tuple(margin > 0.0 for margin in margins)  # a tie counts as a miss
    accuracy = sum(hits) / len(hits)
    return PairScore(
        phenomenon=phenomenon,
        pairs=len(hits),
        accuracy=accuracy,
        example=example,
        standard_error=math.sqrt(accuracy * (1.0 - accuracy) / len(hits)),
        margin=statistics.fmean(margins),
        hits=hits,
        accuracy_by_readout={},
    )
