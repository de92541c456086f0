"""Measures minimal-pair accuracy: how often a model prefers the grammatical sentence of a pair
(`number_agreement.py`).

How: the score of a sentence depends on the pretraining head of the encoder.
- A discriminator: minus its logit for "replaced" at the word that differs.
- A masked language model: the pseudo-log-likelihood of the sentence, which is the sum over its words of
  log p(word | all other words), each word masked in turn.
- A large tower that predicts tokens but was never trained on [MASK] (Replace MLM, All-Tokens MLM):
  log p(the original is this word | the sentence as it stands) at the word that differs; a copy gate is included if the
  head has one.
The grammatical sentence must score strictly higher; a tie counts as a miss. Nothing is trained, so the result
describes the model as it came from pretraining. Chance is 50 %.

Cost: 200 pairs of each of six phenomena are 2,400 short sentences for a discriminator and some 17,000 for an MLM.

Source of the pseudo-log-likelihood: Salazar et al., "Masked language model scoring", ACL 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from electra_dist.errors import UserError
from electra_dist.finetune.number_agreement import Pair, make_pairs
from electra_dist.finetune.training_loop import Ids, Progress, predict, quiet
from electra_dist.pretrained.load_encoder import Pretrained

_BATCH = 128  # sentences per forward
ALL = "all"  # name of the score over all phenomena


class PairScore(NamedTuple):
    """Accuracy on the pairs of one phenomenon, or of all phenomena (`ALL`), as a fraction."""

    phenomenon: str
    pairs: int  # number of pairs
    accuracy: float
    example: str  # a sentence with both forms, as in "the boy is/*are tired ."; empty for `ALL`


def score_minimal_pairs(
    encoder: Pretrained, num_pairs: int, device: torch.device, progress: Progress = quiet, seed: int = 0
) -> list[PairScore]:
    """Score an encoder with its pretraining head on minimal pairs: two sentences, one of which is ungrammatical.

    The sentences of a pair differ in one word, whose number (singular or plural) agrees with the rest in one only.

    Args:
        encoder: the model with its vocabulary; its head and `reads_masks` decide how a sentence is scored.
        num_pairs: pairs requested for each phenomenon; a small vocabulary may give fewer.
        device: where the model runs.
        progress: called after each batch.
        seed: seed of the pairs.

    Returns:
        One score for each phenomenon with at least one pair, then one for all pairs together, named `ALL`.

    Raises:
        UserError: the model has no pretraining head, or its vocabulary has no pairs.
    """
    id_of = encoder.vocabulary.ids
    by_phenomenon = {name: pairs for name, pairs in make_pairs(id_of, num_pairs, seed).items() if pairs}
    pairs = [pair for phenomenon_pairs in by_phenomenon.values() for pair in phenomenon_pairs]
    if not pairs:
        raise UserError(
            f"{encoder.name}: the vocabulary has too few of the templates' English words to form a sentence pair; "
            f"use a model with an English vocabulary"
        )
    score_N = _sentence_scores(encoder, pairs, device, progress)
    good_scores = score_N[0::2]
    bad_scores = score_N[1::2]
    hits = (good_scores > bad_scores).tolist()
    results = []
    for phenomenon, phenomenon_pairs in by_phenomenon.items():
        phenomenon_hits = [hit for pair, hit in zip(pairs, hits) if pair.phenomenon == phenomenon]
        accuracy = sum(phenomenon_hits) / len(phenomenon_hits)
        results.append(PairScore(phenomenon, len(phenomenon_pairs), accuracy, _example(phenomenon_pairs[0])))
    results.append(PairScore(ALL, len(pairs), sum(hits) / len(hits), ""))
    return results


def _sentence_scores(
    encoder: Pretrained, pairs: Sequence[Pair], device: torch.device, progress: Progress
) -> torch.Tensor:
    """Return a score for each sentence, fp32 [2 * pairs]; a higher score means a more natural sentence.

    The order is: grammatical sentence of the first pair, its ungrammatical one, then those of the second pair, and so
    on.
    """
    special = encoder.special
    id_of = encoder.vocabulary.ids
    sentences = [words for pair in pairs for words in (pair.good, pair.bad)]
    ids = [[special.cls, *(id_of[word] for word in words), special.sep] for words in sentences]
    positions = [1 + pair.position for pair in pairs for _ in (pair.good, pair.bad)]  # [CLS] shifts a word by one
    predicts_tokens = "layer_norm.weight" in encoder.head_state()
    if not predicts_tokens:
        return -replaced_logits(encoder, ids, positions, device, progress)
    if encoder.reads_masks:
        return pseudo_log_likelihood(encoder, ids, device, progress)
    return kept_log_probs(encoder, ids, positions, device, progress)


def replaced_logits(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the discriminator's logit of each row at its position, fp32 [N], positive for "replaced".

    Args:
        encoder: a model with a discriminator head.
        ids: N rows of token ids with [CLS] and [SEP], without padding.
        positions: for each row, the index of the token in question.
        device: where the model runs.
        progress: called after each batch.

    Raises:
        UserError: the model has no discriminator head.
    """
    head = _head(encoder, device, "dense.weight", "out.weight")
    backbone = encoder.backbone().to(device).eval()

    def logits(ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the logit of "replaced" of every token of a batch, [B, S]."""
        hidden_BSH = F.gelu(F.linear(backbone(ids_BS), head["dense.weight"], head["dense.bias"]))
        return F.linear(hidden_BSH, head["out.weight"], head["out.bias"]).squeeze(-1).float()

    return _at_positions(logits, encoder, ids, positions, device, progress)


def kept_log_probs(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return log p(the token at each row's position is the original one), natural logarithm, fp32 [N].

    The sentence is read unmasked. If the head has a copy gate, the probability of copying is included, as in the loss
    of All-Tokens MLM.

    Args:
        encoder: a model with a head that predicts tokens.
        ids: N rows of token ids with [CLS] and [SEP], without padding.
        positions: for each row, the index of the token in question.
        device: where the model runs.
        progress: called after each batch.

    Raises:
        UserError: the model has no head that predicts tokens.
    """
    token_log_probs = _token_log_probs(encoder, device)
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    backbone = encoder.backbone().to(device).eval()

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        """Return log p(the original token is the one that is read) of every token of a batch, [B, S]."""
        state_BSH = backbone(ids_BS)
        logp_BS = token_log_probs(state_BSH).gather(2, ids_BS[..., None]).squeeze(-1)
        if "copy_gate.weight" not in head:
            return logp_BS
        gate_BS = F.linear(state_BSH, head["copy_gate.weight"], head["copy_gate.bias"]).squeeze(-1).float()
        # p(original = token) = p(copy) + (1 - p(copy)) * p(token), with p(copy) = sigmoid(gate), in logarithms.
        return torch.logaddexp(F.logsigmoid(gate_BS), F.logsigmoid(-gate_BS) + logp_BS)

    return _at_positions(log_probs, encoder, ids, positions, device, progress)


class _MaskedToken(NamedTuple):
    """Number of a row and position of a token in it, which is masked in a copy of the row."""

    row: int
    position: int
    original: int  # id of the token


def pseudo_log_likelihood(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the pseudo-log-likelihood of each row, natural logarithm, fp32 [N].

    It is the sum of log p(token | all other tokens) over the tokens between the first ([CLS]) and the last ([SEP]).
    Each of these tokens is masked in a copy of the row, so the model reads as many rows as there are tokens. Rows must
    be single sentences: a masked [SEP] inside a row would change its token types.

    Args:
        encoder: a model with a head that predicts tokens.
        ids: N rows of token ids with [CLS] and [SEP], without padding.
        device: where the model runs.
        progress: called after each batch.

    Raises:
        UserError: the model has no head that predicts tokens.
    """
    token_log_probs = _token_log_probs(encoder, device)
    backbone = encoder.backbone().to(device).eval()
    mask = encoder.special.mask
    masked_tokens = [
        _MaskedToken(number, position, row[position])
        for number, row in enumerate(ids)
        for position in range(1, len(row) - 1)
    ]
    copies = [_with_mask(ids[token.row], token.position, mask) for token in masked_tokens]

    def masked_log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        return token_log_probs(backbone(ids_BS)[ids_BS == mask])  # one masked token per row, hence [B, V]

    total_N = torch.zeros(len(ids))
    for copy_numbers, logp_BV in predict(masked_log_probs, copies, encoder.special.pad, _BATCH, device, progress):
        batch = [masked_tokens[number] for number in copy_numbers]
        original_B = torch.tensor([token.original for token in batch], device=logp_BV.device)
        logp_B = logp_BV.gather(1, original_B[:, None])[:, 0].cpu()
        total_N.index_add_(0, torch.tensor([token.row for token in batch]), logp_B)
    return total_N


def _with_mask(row: Sequence[int], position: int, mask: int) -> list[int]:
    """Return a copy of a row of ids with the id `mask` at one position."""
    return [*row[:position], mask, *row[position + 1 :]]


def _token_log_probs(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build the pretraining head that predicts tokens from the weights that `encoder` holds.

    Returns:
        A function from states [..., H] to fp32 log-probabilities of all tokens [..., V]. Its output layer is the token
            table.

    Raises:
        UserError: the model has no head that predicts tokens.
    """
    head = _head(encoder, device, "dense.weight", "layer_norm.weight", "bias")
    table_VE = encoder.state["embeddings.word.weight"][: encoder.model.vocab_size].to(device)

    def log_probs(state: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of all tokens, [..., V], from states [..., H]."""
        dense = F.gelu(F.linear(state, head["dense.weight"], head["dense.bias"]))
        normed = F.layer_norm(
            dense, dense.shape[-1:], head["layer_norm.weight"], head["layer_norm.bias"], encoder.model.layer_norm_eps
        )
        return F.linear(normed, table_VE, head["bias"]).float().log_softmax(-1)

    return log_probs


def _at_positions(
    function: Callable[[torch.Tensor], torch.Tensor],
    encoder: Pretrained,
    ids: Ids,
    positions: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> torch.Tensor:
    """Apply `function` to all rows in batches; return its value at each row's position, fp32 [N] on the host.

    `function` maps padded ids [B, S] to one value per token, [B, S].
    """
    value_N = torch.empty(len(ids))
    for rows, value_BS in predict(function, ids, encoder.special.pad, _BATCH, device, progress):
        position_B = torch.tensor([positions[row] for row in rows], device=value_BS.device)
        value_N[rows] = value_BS.gather(1, position_B[:, None])[:, 0].cpu()
    return value_N


def _head(encoder: Pretrained, device: torch.device, *needed: str) -> dict[str, torch.Tensor]:
    """Return the weights of the pretraining head on `device`; raise UserError if one of the `needed` is missing."""
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    missing = [name for name in needed if name not in head]
    if missing:
        raise UserError(
            f"{encoder.name}: the model came without its pretraining head ({missing[0]} is missing); "
            f"use the run's folder, or export the model with its head"
        )
    return head


def _example(pair: Pair) -> str:
    """Format a pair as one sentence with both forms of the word that differs, as in "the boy is/*are tired ."."""
    words = list(pair.good)
    words[pair.position] = f"{pair.good[pair.position]}/*{pair.bad[pair.position]}"
    return " ".join(words)
