"""Find the best answer span of each SQuAD window among the candidate starts and ends of the model's span head."""

from __future__ import annotations

from collections.abc import Sequence

from electra_dist.finetune.squad.passage_windows import AnswerWindow
from electra_dist.finetune.squad.span_head import SpanScores

Span = tuple[float, int, int]  # (log-probability, first token, last token), tokens numbered within the passage


def best_spans(windows: Sequence[AnswerWindow], scores: SpanScores, max_answer: int) -> list[Span | None]:
    """Return the best allowed answer span of each window among its candidate starts and ends; None if there is none.

    A span is allowed if it lies in the passage, does not end before it starts, has at most `max_answer` tokens, and
    starts at a token that the window owns (no other window has more context for this token). The best span has the
    highest log p(start) + log p(end | start). `scores` has the candidates of the windows, in the same order.
    """
    # Plain lists, because single elements of a tensor are slow to read.
    start_logps = scores.start_logp_BK.tolist()
    starts = scores.start_BK.tolist()
    end_logps = scores.end_logp_BKK.tolist()
    ends = scores.end_BKK.tolist()

    best: list[Span | None] = []
    for row, window in enumerate(windows):
        allowed_spans: list[Span] = []
        for k, start_position in enumerate(starts[row]):
            for end_logp, end_position in zip(end_logps[row][k], ends[row][k]):
                # Positions in the row become numbers of tokens within the window's part of the passage.
                start = start_position - window.offset
                end = end_position - window.offset
                if _is_allowed(window, start, end, max_answer):
                    logp = start_logps[row][k] + end_logp
                    allowed_spans.append((logp, window.first + start, window.first + end))
        best.append(max(allowed_spans, default=None))
    return best


def _is_allowed(window: AnswerWindow, start: int, end: int, max_answer: int) -> bool:
    """Return whether a span may be the answer; `start` and `end` count from the window's first passage token, 0."""
    is_inside = 0 <= start <= end < len(window.owned)
    if not is_inside:
        return False
    num_tokens = end - start + 1
    return window.owned[start] and num_tokens <= max_answer
