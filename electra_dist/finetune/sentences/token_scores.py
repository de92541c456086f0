"""Compute how plausible a model finds the tokens of a sentence, with the head with which it was pretrained.

How: the score of a token depends on the kind of model. Scores of different kinds are not comparable.

- A discriminator gives a logit for "replaced". The score is log P(original) = log sigmoid(-logit).
- The discriminator of Electric gives an energy E. The score is -E, the token's log-probability given all other
  tokens, up to a constant.
- A masked language model predicts a token that shows [MASK] from all other tokens. The score is
  log p(token | all other tokens), and its sum over a sentence is the pseudo-log-likelihood (see `masked_scores`).
- A model that restores the original tokens of a text with replaced tokens and never saw [MASK] (the objectives Replace
  MLM and All-Tokens MLM) reads the unmasked sentence. The score is log P(the token is the original one).

Cost: one forward pass of a sentence; for a masked language model one pass for each of its tokens.

Shapes: N rows, B rows of a batch, S tokens. Rows are token ids with [CLS] and [SEP], without padding. All functions
call `progress` after each batch with ("predict", rows done, rows in total). Logarithms are natural.
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
from electra_dist.pretrained.encoder import Pretrained


def build_token_scorer(encoder: Pretrained, device: torch.device) -> TokenScorer:
    """Return the function by which this kind of model scores every token of a row but [CLS] and the last [SEP]."""
    if predicts_tokens(encoder):
        if encoder.reads_masks:
            return masked_scorer(encoder, device)
        # Replace MLM and All-Tokens MLM: log P(original), from a distribution over the vocabulary.
        token_scores = kept_log_prob_function(encoder, device)
    else:
        discriminator_outputs = discriminator_output_function(encoder, device)

        def token_scores(ids_BS: torch.Tensor) -> torch.Tensor:
            output_BS = discriminator_outputs(ids_BS)
            if encoder.gives_energies:
                return -output_BS  # Electric: the output is an energy, and a low energy means a probable token
            return F.logsigmoid(-output_BS)  # RTD: the output is the logit of "replaced"

    def score(ids: Ids, progress: Progress = quiet) -> list[torch.Tensor]:
        return _values_between_ends(token_scores, encoder, ids, device, progress)

    return score


def score_places(
    encoder: Pretrained,
    ids: Ids,
    places: Sequence[tuple[int, int]],
    device: torch.device,
    progress: Progress = quiet,
) -> torch.Tensor:
    """Return the scores of the tokens at n places in the rows `ids`, fp32 [n].

    A place is (index of the row, position in the row), but never the first or last position of a row. A masked
    language model reads a copy of the row for each place; every other model reads each row once.
    """
    if predicts_tokens(encoder) and encoder.reads_masks:
        return masked_log_probs(encoder, ids, places, device, progress)
    scores = build_token_scorer(encoder, device)(ids, progress)
    return torch.stack([scores[row][position - 1] for row, position in places])


def sentence_log_probs(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return for each row the sum of its tokens' scores, without [CLS] and the last [SEP], fp32 [N].

    The module's section How defines the scores. For a masked language model the sum is the pseudo-log-likelihood.
    """
    return _row_sums(build_token_scorer(encoder, device)(ids, progress))


def replaced_logits(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the discriminator's logit of "replaced" at one position of each row, fp32 [N]."""
    replaced_logit = discriminator_output_function(encoder, device)
    return _at_positions(replaced_logit, encoder, ids, positions, device, progress)


def kept_log_probs(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return log P(the token is the original one) at one position of each row, fp32 [N]; the rows are not masked."""
    return _at_positions(kept_log_prob_function(encoder, device), encoder, ids, positions, device, progress)


def pseudo_log_likelihood(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the sum of log p(token | all other tokens) over each row's tokens without [CLS] and [SEP], fp32 [N].

    Rows must be single sentences: a pair has a [SEP] inside the row, and masking this [SEP] would change the token
    types.
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
    """Apply `function` to all rows in batches; return its values at one position of each row, fp32 [N] on the host."""
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
    """Apply `function` to all rows in batches; return each row's values without those of its first and last token."""
    values = [torch.empty(0)] * len(ids)
    for rows, value_BS in predict(function, ids, encoder.special.pad, SENTENCES_PER_BATCH, device, progress):
        for row, value_S in zip(rows, value_BS.cpu(), strict=True):
            values[row] = value_S[1 : len(ids[row]) - 1].clone()  # a view would keep the whole batch in memory
    return values


def _row_sums(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([value.double().sum().item() for value in values], dtype=torch.float32)
