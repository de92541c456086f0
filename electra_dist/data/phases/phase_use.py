"""Compute how much of each phase's corpus a run has used after a number of steps, for logs, reports and model cards.

A phase is the part of a run that trains on one corpus (`data.phases`).

Limits: rows of skipped steps are counted, too. Tokens are estimated: the number of rows times the mean number of
tokens in a row of the corpus, [PAD] not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """How much of one phase's corpus a run has trained on up to some step."""

    from_step: int  # first step of the phase, from 0
    fingerprint: str  # of the corpus
    corpus_rows: int
    corpus_tokens: int  # without [PAD]
    rows: int  # rows trained on up to that step; a row of the corpus counts again in each epoch

    @property
    def tokens(self) -> float:
        """Return how many tokens the run has trained on in this phase, estimated from the rows; [PAD] not counted."""
        return self.rows * self.corpus_tokens / self.corpus_rows

    @property
    def epochs(self) -> float:
        """Return how many times the run has trained on the whole corpus in this phase, with fractions."""
        return self.rows / self.corpus_rows


def steps_of_phases(from_steps: Sequence[int], num_steps: int) -> list[int]:
    """Return how many of the first `num_steps` steps each phase has; `from_steps` are the phases' first steps."""
    end_steps = [*from_steps[1:], num_steps]
    ends_so_far = [min(end_step, num_steps) for end_step in end_steps]
    return [max(0, end - first) for first, end in zip(from_steps, ends_so_far, strict=True)]


def uses_of_phases(phases: Sequence[Mapping[str, Any]], num_steps: int, global_batch: int) -> list[PhaseUse]:
    """Return how much of each phase's corpus the first `num_steps` steps have used; [] without `data.phases`.

    `phases` is the entry "phases" of `RunCorpora.sizes()` or of environment.json. `global_batch` is in rows.
    """
    if not phases:
        return []
    steps = steps_of_phases([phase["from_step"] for phase in phases], num_steps)
    return [
        PhaseUse(
            from_step=phase["from_step"],
            fingerprint=phase["fingerprint"],
            corpus_rows=phase["rows"],
            corpus_tokens=phase["tokens"],
            rows=steps_of_phase * global_batch,
        )
        for phase, steps_of_phase in zip(phases, steps, strict=True)
    ]


def token_shares(uses: Sequence[PhaseUse]) -> list[float]:
    """Return which share of the run's tokens each phase has used, from 0 to 1; all 0 before the first step."""
    tokens = sum(use.tokens for use in uses)
    return [use.tokens / max(tokens, 1.0) for use in uses]


def tokens_per_row(sizes: Mapping[str, Any], num_steps: int, global_batch: int) -> float:
    """Return the mean number of tokens in the rows of the first `num_steps` steps (at least 1), [PAD] not counted."""
    uses = uses_of_phases(sizes.get("phases", ()), num_steps, global_batch)
    if not uses:
        return float(sizes["tokens"] / sizes["rows"])
    return sum(use.tokens for use in uses) / sum(use.rows for use in uses)
