"""Which spans may be an answer. The beam that proposes them is tested in test_task_heads.py."""

from __future__ import annotations

import torch

from electra_dist.finetune.squad.answer_spans import best_spans
from electra_dist.finetune.squad.passage_windows import AnswerWindow
from electra_dist.finetune.task_heads import SpanScores


def test_spans_of_the_question_and_too_long_ones_are_no_answers() -> None:
    window = AnswerWindow(0, [], offset=3, first=0, owned=[True, True, False, True])
    one = torch.zeros(1, 1)

    def best(start: int, end: int) -> object:
        scores = SpanScores(one, torch.tensor([[start]]), one[None], torch.tensor([[[end]]]), torch.zeros(1))
        return best_spans([window], scores, max_answer=3)[0]

    assert best(3, 5) == (0.0, 0, 2)
    assert best(3, 6) is None  # four tokens
    assert best(5, 6) is None  # another window knows more about that start
    assert best(0, 3) is None  # [CLS]
    assert best(4, 3) is None  # backwards
    assert best(6, 7) is None  # [SEP]
