"""Computes how plausible a model finds the tokens of a sentence, with the head with which it was pretrained.

How: a model reads a token in one of four ways.
- A discriminator gives a logit for "replaced": P(original) of a token is sigmoid(-logit).
- The discriminator of Electric gives an energy E: -E is the token's log-probability given all other tokens, up to a
  constant.
- A masked language model predicts a token that shows [MASK] from all other tokens.
- A model that restores the original tokens of a text with replaced tokens and never saw [MASK] (the objectives Replace
  MLM and All-Tokens MLM) gives the probability that the token is the original one, from the unmasked sentence.

Source of the pseudo-log-likelihood: Salazar et al., "Masked language model scoring", ACL 2020.

Shapes: N rows, B rows of a batch, S tokens, H hidden width, V tokens of the vocabulary, C copies of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from electra_dist.finetune.sentences.head_outputs import (
    SENTENCES_PER_BATCH,
    discriminator_output_function,
    kept_log_prob_function,
    predicts_tokens,
)
from electra_dist.finetune.sentences.masked_scores import TokenScorer, masked_log_probs, masked_scorer
from electra_dist.finetune.training_loop import Ids, Progress, predict, quiet
from electra_dist.pretrained.load_encoder import Pretrained


def build_token_scorer(encoder: Pretrained, device: torch.device) -> TokenScorer:
    """Load a model with its pretraining head to a device; return a function that scores every token of rows of ids.

    The meaning of a token's score depends on the kind of model, and scores of different kinds are not comparable.
    Logarithms are natural.
    - discriminator: log P(the token is the original one), given the sentence;
    - discriminator of Electric: minus the energy, which is log p(token | all other tokens) up to a constant;
    - masked language model: log p(token | all other tokens);
    - model that restores replaced tokens: log P(the token is the original one), given the sentence.
    """
    if predicts_tokens(encoder):
        if encoder.reads_masks:
            return masked_scorer(encoder, device)
        # Replace MLM and All-Tokens MLM: log P(original), from a distribution over the vocabulary.
        token_scores = kept_log_prob_function(encoder, device)
    else:
        discriminator_outputs = discriminator_output_function(encoder, device)

        def token_scores(ids_BS: torch.Tensor) -> torch.Tensor:
            """Return the score of every token of a batch from the outputs of a discriminator, fp32 [B, S]."""
            output_BS = discriminator_outputs(ids_BS)
            if encoder.gives_energies:
                return -output_BS  # Electric: the output is an energy, and a low energy means a probable token
            return F.logsigmoid(-output_BS)  # RTD: the output is the logit of "replaced"

    def score(ids: Ids, progress: Progress = quiet) -> list[torch.Tensor]:
        """Return the scores of the tokens of each row; the model reads each row once, without [MASK]."""
        return _values_between_ends(token_scores, encoder, ids, device, progress)

    return score


def score_places(
    encoder: Pretrained,
    ids: Ids,
    places: Sequence[tuple[int, int]],
    device: torch.device,
    progress: Progress = quiet,
) -> torch.Tensor:
    """Return the scores of the tokens at some places of rows, fp32 [n] on the host.

    Args:
        ids: N rows of token ids with [CLS] and [SEP], without padding.
    """
    if predicts_tokens(encoder) and encoder.reads_masks:
        return masked_log_probs(encoder, ids, places, device, progress)
    scores = build_token_scorer(encoder, device)(ids, progress)
    return torch.stack([scores[row][position - 1] for row, position in places])


def sentence_log_probs(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the log-probability that the encoder gives to each whole sentence, natural logarithm, fp32 [N].

    Args:
        ids: N rows of token ids, `[CLS] sentence [SEP]`, without padding.
    """
    return _row_sums(build_token_scorer(encoder, device)(ids, progress))


def replaced_logits(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the discriminator's logit of "replaced" at one position of each row, fp32 [N].

    Args:
        ids: N rows of token ids with [CLS] and [SEP], without padding.
    """
    replaced_logit = discriminator_output_function(encoder, device)
    return _at_positions(replaced_logit, encoder, ids, positions, device, progress)


def kept_log_probs(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the log-probability that the token at one position of each row is the original one, fp32 [N].

    Args:
        ids: N rows of token ids with [CLS] and [SEP], without padding.
    """
    return _at_positions(kept_log_prob_function(encoder, device), encoder, ids, positions, device, progress)


def pseudo_log_likelihood(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the pseudo-log-likelihood of each row, natural logarithm, fp32 [N].

    Args:
        ids: N rows of token ids with [CLS] and [SEP], without padding.
    """
    return _row_sums(masked_scorer(encoder, device)(ids, progress))


def _at_positions(
    function: Callable[[torch.Tensor], torch.Tensor],
    encoder: Pretrained,
    ids: Ids,
    positions: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> torch.Tensor:
    """Compute a value for every token in batches; return the value at one position of each row, fp32 [N] on the
    host.
    """
    value_N = torch.empty(len(ids))
    for rows, value_BS in predict(function, ids, encoder.special.pad, SENTENCES_PER_BATCH, device, progress):
        position_B = torch.tensor([positions[row] for row in rows], device=value_BS.device)
        value_N[rows] = value_BS.gather(1, position_B[:, None])[:, 0].cpu()
    return value_N


def _values_between_ends(
    function: Callable[[torch.Tensor], torch.Tensor],
    encoder: Pretrained,
    ids: Ids,
    device: torch.device,
    progress: Progress,
) -> list[torch.Tensor]:
    """Compute a value for every token in batches; return the values between the first and the last token of each
    row.
    """
    values = [torch.empty(0)] * len(ids)
    for rows, value_BS in predict(function, ids, encoder.special.pad, SENTENCES_PER_BATCH, device, progress):
        for row, value_S in zip(rows, value_BS.cpu(), strict=True):
            values[row] = value_S[1 : len(ids[row]) - 1].clone()  # a view would keep the whole batch in memory
    return values


def _row_sums(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each of N tensors as one fp32 tensor [N]; the sums are taken in float64."""
    return torch.tensor([value.double().sum().item() for value in values], dtype=torch.float32)
