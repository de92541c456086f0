"""Compute how much of each phase's corpus a run has used after a number of steps, for logs, reports and model cards.

Limits: rows of skipped steps are counted, too. Tokens are the rows times the mean number of tokens in a row of the
corpus, [PAD] not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """Use of one phase's corpus by a run up to some step."""

    from_step: int
    fingerprint: str  # of the corpus
    corpus_rows: int
    corpus_tokens: int
    rows: int  # used so far; a row counts once in each epoch

    @property
    def tokens(self) -> float:
        """Return the tokens used so far, estimated from the rows."""
        return self.rows * self.corpus_tokens / self.corpus_rows

    @property
    def epochs(self) -> float:
        """Return how many epochs of the corpus were used so far."""
        return self.rows / self.corpus_rows


def steps_of_phases(from_steps: Sequence[int], num_steps: int) -> list[int]:
    """Return how many of the first `num_steps` steps of a run belong to each phase.

    Args:
        from_steps: first step of each phase, ascending; the first is 0.
        num_steps: steps of the run that are counted.
    """
    end_steps = [*from_steps[1:], num_steps]
    ends_so_far = [min(end_step, num_steps) for end_step in end_steps]
    return [max(0, end - first) for first, end in zip(from_steps, ends_so_far, strict=True)]


def uses_of_phases(phases: Sequence[Mapping[str, Any]], num_steps: int, global_batch: int) -> list[PhaseUse]:
    """Return the use of each phase's corpus in the first `num_steps` steps of a run.

    Args:
        phases: entries of `RunCorpora.sizes`, which environment.json has as well; empty for a run without phases.
        num_steps: steps done.
        global_batch: rows of a step, over all ranks.
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


def tokens_per_row(sizes: Mapping[str, Any], num_steps: int, global_batch: int) -> float:
    """Return the mean number of tokens in the rows of the first `num_steps` steps of a run, [PAD] not counted.

    Args:
        sizes: result of `RunCorpora.sizes`.
        num_steps: steps done, at least 1.
        global_batch: rows of a step, over all ranks.
    """
    uses = uses_of_phases(sizes.get("phases", ()), num_steps, global_batch)
    if not uses:
        return float(sizes["tokens"] / sizes["rows"])
    return sum(use.tokens for use in uses) / sum(use.rows for use in uses)
