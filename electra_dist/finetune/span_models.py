"""Propose answer spans for SQuAD with the head of transformers' classes, and choose the best span of each window.

A passage that is too long for a row is cut into overlapping parts; the question with one of these parts is a window,
and each row is a window.

How: one Dense(H -> 2) over the states gives the logits of start and end, which do not depend on each other. In a
window without the answer, both targets are [CLS], so the probability of [CLS] is that of "no answer". The loss is the
mean of the two cross-entropies over all tokens of a row without its padding. In prediction, only tokens of the passage
and [CLS] take part. The no-answer logit of a row compares [CLS] with the best span among the candidates: log p(start =
CLS) + log p(end = CLS) - log p(start) - log p(end). `paper_heads.py` has the head of google-research/electra.

Source: Devlin et al., "BERT", NAACL 2019, section 4.2 and 4.3; transformers' ElectraForQuestionAnswering.

Shapes: B rows, S tokens, K beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.operation_types import SpecialIds
from typing_extensions import override

from electra_dist.finetune.models import Network, TaskModel
from electra_dist.finetune.passage_windows import AnswerWindow
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.row_layout import derive

OUTSIDE = -1000.0  # added to the start and end logits of positions that cannot be part of an answer
Span = tuple[float, int, int]  # (log-probability, first token, last token), tokens numbered within the passage


class SpanScores(NamedTuple):
    """Candidate answer spans of each of B rows: the K best starts, and the K best ends for each start, best first."""

    start_logp_BK: torch.Tensor  # natural log-probabilities of the starts, fp32
    start_BK: torch.Tensor  # positions of the starts in the row of ids, int64
    end_logp_BKK: torch.Tensor  # [row, start, end]: log-probability of the end, given the start, fp32
    end_BKK: torch.Tensor  # [row, start, end]: positions of the ends, int64
    no_answer_B: torch.Tensor  # logit, positive for "no answer", fp32


class AnswerModel(TaskModel):
    """Base class of SQuAD models. A model proposes answer spans for rows of a question and a part of a passage.

    A training target has three int64 numbers per row: start position, end position, and 1 if the question has no
    answer, else 0. Both positions are 0, the [CLS], in a row that does not contain the answer.
    """

    def __init__(self, network: Network, special: SpecialIds, beam: int) -> None:
        """Take a network; `beam` is the number of starts that are proposed, and of ends for each of them."""
        super().__init__(network, special)
        self.beam = beam

    def allowed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return which positions may be the start or the end of an answer, bool [B, S].

        These are the tokens of the passage with its final [SEP], as in google-research/electra, and [CLS], which
        stands for "no answer".
        """
        allowed_BS = derive(ids_BS, self.special).token_type_BS == 1
        allowed_BS[:, 0] = True
        return allowed_BS

    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """Return the candidate answer spans of each row, and its logit of "no answer", in evaluation mode."""
        raise NotImplementedError


class LinearSpanModel(AnswerModel):
    """SQuAD model whose outputs are the logits of an answer's start and end at every token."""

    @override
    def forward(self, ids_BS: torch.Tensor, target_B3: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        start_logit_BS, end_logit_BS = self.network(ids_BS, dropout_keys).float().unbind(-1)
        is_pad_BS = ids_BS == self.special.pad
        start_loss = F.cross_entropy(start_logit_BS + OUTSIDE * is_pad_BS, target_B3[:, 0])
        end_loss = F.cross_entropy(end_logit_BS + OUTSIDE * is_pad_BS, target_B3[:, 1])
        return (start_loss + end_loss) / 2

    @override
    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """Return each row's K best starts, its K best ends (the same ones for all starts), and its no-answer logit."""
        is_outside_BS = ~self.allowed(ids_BS)
        start_logit_BS, end_logit_BS = self.predict(ids_BS).unbind(-1)
        start_logp_BS = (start_logit_BS + OUTSIDE * is_outside_BS).log_softmax(-1)
        end_logp_BS = (end_logit_BS + OUTSIDE * is_outside_BS).log_softmax(-1)
        beam = min(self.beam, ids_BS.shape[1])
        start_logp_BK, start_BK = start_logp_BS.topk(beam)
        end_logp_BK, end_BK = end_logp_BS.topk(beam)
        shape_BKK = (-1, beam, -1)
        scores = SpanScores(
            start_logp_BK=start_logp_BK,
            start_BK=start_BK,
            end_logp_BKK=end_logp_BK[:, None].expand(shape_BKK),
            end_BKK=end_BK[:, None].expand(shape_BKK),
            no_answer_B=start_logp_BS[:, 0] + end_logp_BS[:, 0],
        )
        return scores._replace(no_answer_B=scores.no_answer_B - _best_span_logp(scores))


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


def _best_span_logp(scores: SpanScores) -> torch.Tensor:
    """Return log p(start) + log p(end) of each row's most probable span among the candidates, fp32 [B]."""
    # A pair is no span if it starts at [CLS], which stands for "no answer", or if it ends before it starts. A row
    # without any span gets the lowest finite number, which makes its logit of "no answer" larger than any other.
    logp_BKK = scores.start_logp_BK[..., None] + scores.end_logp_BKK
    start_BK1 = scores.start_BK[..., None]
    is_span_BKK = (start_BK1 > 0) & (scores.end_BKK >= start_BK1)
    lowest = torch.finfo(logp_BKK.dtype).min
    return logp_BKK.masked_fill(~is_span_BKK, lowest).flatten(1).amax(1)
