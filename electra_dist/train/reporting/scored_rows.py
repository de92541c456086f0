"""Keep some rows of an evaluation with the discriminator's judgement of each token, and turn them into text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from electra_dist.objectives.base import StepOutput
from electra_dist.pretrained.weights import read_run_vocabulary
from electra_dist.run.metrics import TextSample

MAX_TOKENS = 64  # of a row that a text sample shows


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """First S tokens of a held-out row: original ids, ids that the discriminator read, and its probabilities."""

    original_S: np.ndarray  # int64 ids of the corpus
    shown_S: np.ndarray  # int64 ids with the generator's replacements
    replaced_probability_S: np.ndarray  # the discriminator's probability that the token was replaced, fp32


def first_rows(original_BS: np.ndarray, output: StepOutput, num_rows: int) -> list[ScoredRow]:
    """Return the first `num_rows` rows of a micro-batch, each cut to 64 tokens, without padding.

    Rows that consist of padding only are left out.
    """
    assert output.shown_BS is not None, "`Objective.output` gives the ids"
    scored_rows = []
    for row in range(min(num_rows, len(original_BS))):
        is_real_S = output.is_real_BS[row, :MAX_TOKENS].cpu().numpy()
        if not is_real_S.any():
            continue
        scored_rows.append(
            ScoredRow(
                original_S=original_BS[row, :MAX_TOKENS][is_real_S],
                shown_S=output.shown_BS[row, :MAX_TOKENS].cpu().numpy()[is_real_S],
                replaced_probability_S=output.rtd_logit_BS[row, :MAX_TOKENS].sigmoid().cpu().numpy()[is_real_S],
            )
        )
    return scored_rows


def text_sample(row: ScoredRow, tokens: Sequence[str]) -> TextSample:
    """Turn the ids of a row into text, `tokens[id]` for each id, and round its probabilities to 4 decimals."""
    return TextSample(
        original=[_token(tokens, token_id) for token_id in row.original_S],
        shown=[_token(tokens, token_id) for token_id in row.shown_S],
        replaced_probability=[round(float(probability), 4) for probability in row.replaced_probability_S],
    )


def read_tokens(run_dir: Path) -> list[str]:
    """Return the text of each token in a run's vocabulary, by id; one that continues a word begins with ##."""
    return read_run_vocabulary(run_dir).shown_tokens


def _token(tokens: Sequence[str], token_id: int) -> str:
    """Return the text of a token, or "[ID]" for an id that is not in the vocabulary but in the model's table."""
    return tokens[token_id] if token_id < len(tokens) else f"[{token_id}]"
