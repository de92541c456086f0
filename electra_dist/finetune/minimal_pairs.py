"""Measures minimal-pair accuracy: how often a model prefers the grammatical sentence of a pair.

The pairs are those of `number_agreement.py`, such as "the boy is tired" and "the boy are tired".

How: the score of a sentence depends on the head with which the encoder was pretrained.
- A discriminator: minus its logit for "replaced" at the word that differs.
- A masked language model: the pseudo-log-likelihood of the sentence, which is the sum over its words of log p(word |
  all other words), each word masked in turn.
- A model that restores the original tokens of a text with replaced tokens and never saw [MASK] (the objectives Replace
  MLM and All-Tokens MLM): log p(this word is the original one | the unmasked sentence) at the word that differs.
  All-Tokens MLM has a copy gate, the predicted probability that a token was not replaced, which is part of p. The
  grammatical sentence must score strictly higher; a tie counts as a miss. Nothing is trained, so the result describes
  the model as it came from pretraining. Chance is 50 %.

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
    """Accuracy on the pairs of one phenomenon, or of all phenomena (`ALL`), as a fraction.

    A phenomenon is a kind of number agreement, such as "subject-verb". The accuracy is the share of pairs whose
    grammatical sentence has the higher score; `example` shows one pair.
    """

    phenomenon: str
    pairs: int  # number of pairs
    accuracy: float
    example: str  # a sentence with both forms, as in "the boy is/*are tired ."; empty for `ALL`


def score_minimal_pairs(
    encoder: Pretrained, num_pairs: int, device: torch.device, progress: Progress = quiet, seed: int = 0
) -> list[PairScore]:
    """Score an encoder with its pretraining head on minimal pairs: two sentences, one of which is ungrammatical.

    The sentences of a pair differ in one word, which has the right grammatical number in one of them only, as in "the
    boy is tired" and "the boy are tired". The score is the share of pairs whose grammatical sentence scores higher.

    Args:
        encoder: the model with its vocabulary; the score of a sentence depends on the kind of its head and on
            `reads_masks`, which is true if it was trained on text with [MASK].
        num_pairs: pairs requested for each phenomenon (kind of agreement); a small vocabulary may give fewer.
        device: where the model runs.
        progress: called after each batch with ("predict", rows done, rows in total).
        seed: seed of the pairs.

    Returns:
        One score for each phenomenon with at least one pair, then one for all pairs together, named `ALL`.

    Raises:
        UserError: the model has no pretraining head, or its vocabulary lacks the words to form any pair.
    """
    pairs_of = make_pairs(encoder.vocabulary.ids, num_pairs, seed)  # phenomenon -> its pairs
    all_pairs = [pair for phenomenon_pairs in pairs_of.values() for pair in phenomenon_pairs]
    if not all_pairs:
        raise UserError(
            f"{encoder.name}: the vocabulary has too few of the templates' English words to form a sentence pair; "
            f"use a model with an English vocabulary"
        )
    # Scores alternate: the grammatical sentence of a pair, then its ungrammatical one. A tie counts as a miss.
    sentence_scores = _sentence_scores(encoder, all_pairs, device, progress)
    good_scores = sentence_scores[0::2]
    bad_scores = sentence_scores[1::2]
    is_hit = (good_scores > bad_scores).tolist()

    results = []
    first = 0  # index in `all_pairs` of the phenomenon's first pair
    for phenomenon, phenomenon_pairs in pairs_of.items():
        if not phenomenon_pairs:
            continue
        size = len(phenomenon_pairs)
        accuracy = sum(is_hit[first : first + size]) / size
        example = _example(phenomenon_pairs[0])
        results.append(PairScore(phenomenon=phenomenon, pairs=size, accuracy=accuracy, example=example))
        first += size
    total_accuracy = sum(is_hit) / len(is_hit)
    results.append(PairScore(phenomenon=ALL, pairs=len(all_pairs), accuracy=total_accuracy, example=""))
    return results


def _sentence_scores(
    encoder: Pretrained, pairs: Sequence[Pair], device: torch.device, progress: Progress
) -> torch.Tensor:
    """Return a score for each sentence, fp32 [2 * pairs]; a higher score means a more natural sentence.

    The order is: grammatical sentence of the first pair, its ungrammatical one, then those of the second pair, and so
    on. A discriminator gives minus its logit of "replaced" at the word that differs. A masked language model gives the
    pseudo-log-likelihood of the sentence. A model that restores replaced tokens without [MASK] gives the
    log-probability that the word that differs is the original one. Scores of different kinds are not comparable.
    """
    special = encoder.special
    id_of = encoder.vocabulary.ids
    ids = []
    positions = []  # for each row, the index of the word that differs
    for pair in pairs:
        for sentence in (pair.good, pair.bad):
            word_ids = [id_of[word] for word in sentence]
            ids.append([special.cls, *word_ids, special.sep])
            positions.append(1 + pair.position)  # [CLS] shifts every word by one

    # Only a head that predicts tokens has a LayerNorm; the other kind is that of a discriminator.
    predicts_tokens = "layer_norm.weight" in encoder.head_state()
    if not predicts_tokens:
        return -replaced_logits(encoder, ids, positions, device, progress)
    if encoder.reads_masks:
        return pseudo_log_likelihood(encoder, ids, device, progress)
    # Replace MLM or All-Tokens MLM: the model never saw [MASK] in training, so it reads the sentence as it stands.
    return kept_log_probs(encoder, ids, positions, device, progress)


def replaced_logits(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the discriminator's logit of "replaced" at one position of each row, fp32 [N].

    A positive logit means that the discriminator takes the token at this position for a replaced one.

    Args:
        encoder: a model with a discriminator head.
        ids: N rows of token ids with [CLS] and [SEP], without padding.
        positions: for each row, the index of the token in question.
        device: where the model runs.
        progress: called after each batch with ("predict", rows done, rows in total).

    Raises:
        UserError: the model has no discriminator head.
    """
    head = _head(encoder, device, "dense.weight", "out.weight")
    backbone = encoder.backbone().to(device).eval()

    def logits(ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the logit of "replaced" of every token of a batch, fp32 [B, S]."""
        state_BSH = backbone(ids_BS)
        hidden_BSH = F.gelu(F.linear(state_BSH, head["dense.weight"], head["dense.bias"]))
        logit_BS1 = F.linear(hidden_BSH, head["out.weight"], head["out.bias"])
        return logit_BS1.squeeze(-1).float()

    return _at_positions(logits, encoder, ids, positions, device, progress)


def kept_log_probs(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the log-probability that the token at one position of each row is the original one, fp32 [N].

    The model reads the row without [MASK] and predicts a distribution p of the original token; logarithms are natural.
    Without a copy gate the result is log p(token). A head with a copy gate (All-Tokens MLM) also predicts the
    probability c that the token was not replaced. The result is then log(c + (1 - c) * p(token)).

    Args:
        encoder: a model with a head that predicts tokens.
        ids: N rows of token ids with [CLS] and [SEP], without padding.
        positions: for each row, the index of the token in question.
        device: where the model runs.
        progress: called after each batch with ("predict", rows done, rows in total).

    Raises:
        UserError: the model has no head that predicts tokens.
    """
    token_log_probs = _token_log_probs(encoder, device)
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    backbone = encoder.backbone().to(device).eval()

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        """Return for every token of a batch the log-probability that it is the original one, fp32 [B, S]."""
        state_BSH = backbone(ids_BS)
        logp_BSV = token_log_probs(state_BSH)
        logp_BS = logp_BSV.gather(2, ids_BS[..., None]).squeeze(-1)
        if "copy_gate.weight" not in head:
            return logp_BS
        gate_BS = F.linear(state_BSH, head["copy_gate.weight"], head["copy_gate.bias"]).squeeze(-1).float()
        copy_logp_BS = F.logsigmoid(gate_BS)  # log c, with c = sigmoid(gate)
        no_copy_logp_BS = F.logsigmoid(-gate_BS)  # log(1 - c)
        return torch.logaddexp(copy_logp_BS, no_copy_logp_BS + logp_BS)

    return _at_positions(log_probs, encoder, ids, positions, device, progress)


class _MaskedToken(NamedTuple):
    """Token that is masked in a copy of its row: number of the row, index in the row, and original id.

    The model reads the copy and has to predict the original id.
    """

    row: int  # number of the row
    position: int  # index of the token in the row
    original: int  # id of the token


def pseudo_log_likelihood(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the pseudo-log-likelihood of each row, natural logarithm, fp32 [N].

    It is the sum of log p(token | all other tokens) over the tokens between the first ([CLS]) and the last ([SEP]).
    Each of these tokens is masked in a copy of its row, so the model reads one copy per token. Rows must be single
    sentences: a pair has a [SEP] inside the row, and masking it would change the token types.

    Source: Salazar et al., "Masked language model scoring", ACL 2020.

    Args:
        encoder: a model with a head that predicts tokens.
        ids: N rows of token ids with [CLS] and [SEP], without padding.
        device: where the model runs.
        progress: called after each batch with ("predict", copies done, copies in total).

    Raises:
        UserError: the model has no head that predicts tokens.
    """
    token_log_probs = _token_log_probs(encoder, device)
    backbone = encoder.backbone().to(device).eval()
    mask = encoder.special.mask
    masked_tokens = []
    copies = []  # copies[i] is a row in which masked_tokens[i] is masked
    for number, row in enumerate(ids):
        for position in range(1, len(row) - 1):  # all but [CLS] and the last [SEP]
            masked_tokens.append(_MaskedToken(row=number, position=position, original=row[position]))
            copies.append(_with_mask(row, position, mask))

    def masked_log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of all tokens of the vocabulary at the masked token of each row, [B, V]."""
        state_BSH = backbone(ids_BS)
        masked_state_BH = state_BSH[ids_BS == mask]  # one masked token per row
        return token_log_probs(masked_state_BH)

    total_N = torch.zeros(len(ids))
    for copy_numbers, logp_BV in predict(masked_log_probs, copies, encoder.special.pad, _BATCH, device, progress):
        batch_tokens = [masked_tokens[number] for number in copy_numbers]
        original_B = torch.tensor([token.original for token in batch_tokens], device=logp_BV.device)
        row_B = torch.tensor([token.row for token in batch_tokens])
        logp_B = logp_BV.gather(1, original_B[:, None])[:, 0].cpu()
        total_N.index_add_(0, row_B, logp_B)
    return total_N


def _with_mask(row: Sequence[int], position: int, mask: int) -> list[int]:
    """Return a copy of a row of ids in which the id at `position` is replaced by `mask`, the id of [MASK]."""
    return [*row[:position], mask, *row[position + 1 :]]


def _token_log_probs(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build the pretraining head that predicts tokens from the weights that `encoder` holds.

    Returns:
        A function from states [..., H] to fp32 log-probabilities of all V tokens, [..., V]. Its layers are Dense(H ->
        E), GELU, LayerNorm and an output layer; the weight of the last is the encoder's token embedding table [V, E],
        where E is the embedding width.

    Raises:
        UserError: the model has no head that predicts tokens.
    """
    head = _head(encoder, device, "dense.weight", "layer_norm.weight", "bias")
    table_VE = encoder.state["embeddings.word.weight"][: encoder.model.vocab_size].to(device)

    def log_probs(state: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of all tokens, fp32 [..., V], from states [..., H]."""
        hidden = F.gelu(F.linear(state, head["dense.weight"], head["dense.bias"]))
        normed = F.layer_norm(
            hidden,
            normalized_shape=hidden.shape[-1:],
            weight=head["layer_norm.weight"],
            bias=head["layer_norm.bias"],
            eps=encoder.model.layer_norm_eps,
        )
        logits = F.linear(normed, table_VE, head["bias"])
        return logits.float().log_softmax(-1)

    return log_probs


def _at_positions(
    function: Callable[[torch.Tensor], torch.Tensor],
    encoder: Pretrained,
    ids: Ids,
    positions: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> torch.Tensor:
    """Compute a value for every token in batches; return the value at one position of each row, fp32 [N] on the host.

    Args:
        function: maps padded ids [B, S] to one value per token, [B, S].
        encoder: provides the id of the padding.
        ids: N rows of token ids without padding.
        positions: for each row, the index of the token whose value is returned.
        device: where `function` runs.
        progress: called after each batch with ("predict", rows done, rows in total).
    """
    value_N = torch.empty(len(ids))
    for rows, value_BS in predict(function, ids, encoder.special.pad, _BATCH, device, progress):
        position_B = torch.tensor([positions[row] for row in rows], device=value_BS.device)
        value_N[rows] = value_BS.gather(1, position_B[:, None])[:, 0].cpu()
    return value_N


def _head(encoder: Pretrained, device: torch.device, *needed: str) -> dict[str, torch.Tensor]:
    """Return the weights of the pretraining head on `device`, keyed by their names within the head.

    The names `needed` are those that the caller's kind of head has, for example "out.weight" for a discriminator.

    Raises:
        UserError: one of the names `needed` is missing, because the model was loaded without its head or has another
            kind of head.
    """
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    missing = [name for name in needed if name not in head]
    if missing:
        raise UserError(
            f"{encoder.name}: the model came without its pretraining head ({missing[0]} is missing); "
            f"use the run's folder, or export the model with its head"
        )
    return head


def _example(pair: Pair) -> str:
    """Format a pair as one sentence with both forms of the word that differs, as in "the boy is/*are tired .".

    The star marks the ungrammatical form, as is usual in linguistics.
    """
    position = pair.position
    words = list(pair.good)
    words[position] = f"{pair.good[position]}/*{pair.bad[position]}"
    return " ".join(words)
