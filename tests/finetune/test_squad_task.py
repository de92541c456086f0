"""Which spans of a window may be an answer. The beam that proposes the spans is tested in test_task_heads.py."""

from __future__ import annotations

import torch

from electra_dist.finetune.models import SpanScores
from electra_dist.finetune.passage_windows import AnswerWindow
from electra_dist.finetune.squad_task import Span, best_spans


def test_a_span_is_an_answer_only_if_it_is_short_lies_in_the_passage_and_starts_at_an_owned_token() -> None:
    """The row is [CLS], a question token, [SEP], four passage tokens at positions 3 to 6, and [SEP] at 7.

    The window does not own the third token of the passage, because another window has more context for it.
    """
    window = AnswerWindow(0, [], offset=3, first=0, owned=[True, True, False, True])

    def best_of_one_candidate(start: int, end: int) -> Span | None:
        """Return the best span if the model proposes one start and one end only, with log-probability 0."""
        scores = SpanScores(
            torch.zeros(1, 1),
            torch.tensor([[start]]),
            torch.zeros(1, 1, 1),
            torch.tensor([[[end]]]),
            torch.zeros(1),
        )
        [span] = best_spans([window], scores, max_answer=3)
        return span

    assert best_of_one_candidate(3, 5) == (0.0, 0, 2)
    assert best_of_one_candidate(3, 6) is None  # four tokens
    assert best_of_one_candidate(5, 6) is None  # starts at the token of another window
    assert best_of_one_candidate(0, 3) is None  # starts at [CLS]
    assert best_of_one_candidate(4, 3) is None  # ends before it starts
    assert best_of_one_candidate(6, 7) is None  # ends at [SEP]
