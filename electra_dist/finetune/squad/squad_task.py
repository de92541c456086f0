"""Makes SQuAD 1.1 and 2.0 a fine-tuning task: training on windows, prediction of answer spans, official metrics.

Guarantee: the answer to a question is the span with the highest log p(start) + log p(end | start) over all windows of
the question, among the spans of the beam that lie in the passage, start at a token that the window owns (see
passage_windows.py), do not end before they start and have at most `max_answer` tokens. The no-answer score of a
question is the lowest no-answer logit of its windows; version 2 is scored at the official best threshold. In version
1 the answerability output is trained, too, as in the reference, and ignored in prediction.

Source: google-research/electra, finetune/qa/qa_metrics.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import find_file
from electra_dist.finetune.squad.passage_windows import (
    AnswerWindow,
    Passage,
    Question,
    SquadFile,
    encode_passages,
    make_windows,
    read_squad,
    window_target,
)
from electra_dist.finetune.squad.squad_metrics import squad1_metrics, squad2_metrics
from electra_dist.finetune.task_heads import SpanModel, SpanScores, TaskModel
from electra_dist.finetune.tasks import Task, TaskOutcome
from electra_dist.finetune.training_loop import Examples, Progress, predict
from electra_dist.pretrained.load_encoder import Pretrained

Span = tuple[float, int, int]  # (log-probability, first token, last token), tokens numbered within the passage

_LABELS = {1: "v1.1", 2: "v2.0"}  # the version in the names of the official files


class SquadTask(Task):
    """Question answering on SQuAD 1.1 or 2.0, scored by the official metrics."""

    def __init__(self, version: int, data: Path) -> None:
        """Read the training and development files.

        Args:
            version: 1 for SQuAD 1.1, 2 for SQuAD 2.0.
            data: folder of train-v1.1.json and dev-v1.1.json (or v2.0), or one with a folder squad/ that contains
                them. If there is no training file, dev-v1.1.split-train.json is read; if there is no development file,
                dev-v1.1.split-heldout.json.

        Raises:
            UserError: a file is missing, or is not a SQuAD file of that version.
        """
        self.version = version
        self.name = f"squad{version}"
        self.metric = "f1" if version == 1 else "best_f1"
        label = _LABELS[version]
        train_file = _find(data, f"train-{label}.json", f"dev-{label}.split-train.json")
        dev_file = _find(data, f"dev-{label}.json", f"dev-{label}.split-heldout.json")
        self.train = read_squad(train_file, version)
        self.dev = read_squad(dev_file, version)
        self.digest = hashlib.sha256(train_file.read_bytes() + dev_file.read_bytes()).hexdigest()
        num_lost = sum(_is_lost(question) for question in self.train.questions)
        self.notes = []
        if num_lost > 0:
            self.notes = [f"{train_file}: {num_lost} questions whose answer is not in the passage are left out"]

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Return every window of every training question, with its start, its end and whether it is unanswerable.

        Questions whose answer does not occur in the passage are left out.
        """
        passages, windows = _windows(self.train, encoder, settings)
        ids, targets = [], []
        for window in windows:
            question = self.train.questions[window.question]
            if _is_lost(question):
                continue
            first_token, last_token = 0, -1  # an empty span, for a question without an answer
            if question.answers:
                end = question.start + len(question.answers[0])
                first_token, last_token = passages[question.passage].tokens(question.start, end)
            ids.append(window.ids)
            targets.append(window_target(window, first_token, last_token, impossible=not question.answers))
        return Examples(ids, torch.tensor(targets))

    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> SpanModel:
        """Build a span model on the host: a copy of the encoder with a new SQuAD head."""
        backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        return SpanModel(backbone, encoder.tower.hidden_size, settings, seed)

    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Predict an answer to every development question with a trained `SpanModel`, and score the answers."""
        assert isinstance(model, SpanModel)
        passages, windows = _windows(self.dev, encoder, settings)
        device = next(model.parameters()).device
        best: dict[int, Span] = {}
        no_answer: dict[int, float] = {}
        ids = [window.ids for window in windows]
        for rows, scores in predict(model.search, ids, encoder.special.pad, settings.batch, device, progress):
            batch_windows = [windows[row] for row in rows]
            spans = best_spans(batch_windows, scores, settings.max_answer)
            for window, span, logit in zip(batch_windows, spans, scores.no_answer_B.tolist()):
                question = window.question
                no_answer[question] = min(no_answer.get(question, logit), logit)
                if span is not None and (question not in best or span > best[question]):
                    best[question] = span
        return self.score(passages, best, no_answer)

    def score(self, passages: Sequence[Passage], best: dict[int, Span], no_answer: dict[int, float]) -> TaskOutcome:
        """Compute the official metrics from the predicted spans of the development questions.

        Args:
            passages: the passages of the development file in tokens.
            best: number of a question -> its best span; a question without one is answered with "".
            no_answer: number of a question -> its no-answer logit; 0 if it is missing.

        Returns:
            The metrics in per cent. The outcome has failed if no question has an answer or, in version 2, if no
            threshold is better than answering no question at all.
        """
        predicted, no_answer_scores = {}, {}
        for number, question in enumerate(self.dev.questions):
            answer = ""
            if number in best:
                _, first_token, last_token = best[number]
                answer = passages[question.passage].answer(first_token, last_token)
            predicted[question.id] = answer
            no_answer_scores[question.id] = no_answer.get(number, 0.0)
        gold = {question.id: question.answers for question in self.dev.questions}
        failure = "" if any(predicted.values()) else "degenerate: no question has an answer"
        if self.version == 1:
            return TaskOutcome(squad1_metrics(predicted, gold), failure)
        metrics = squad2_metrics(predicted, no_answer_scores, gold)
        score_without_answers = 100.0 * sum(not answers for answers in gold.values()) / len(gold)
        if metrics["best_f1"] <= score_without_answers:
            failure = "degenerate: no threshold beats `no answer` to every question"
        return TaskOutcome(metrics, failure)


def best_spans(windows: Sequence[AnswerWindow], scores: SpanScores, max_answer: int) -> list[Span | None]:
    """Return the best allowed answer span of each window among its candidates from the beam search.

    A span is allowed if it lies in the passage, does not end before it starts, is not too long, and starts at a token
    that the window owns: of overlapping windows, the one that shows the token with the most context owns it.

    Args:
        windows: the windows of a batch.
        scores: candidate starts and ends of the windows, in the same order.
        max_answer: longest answer, in tokens.

    Returns:
        For each window (log-probability, first token, last token), the tokens numbered within the passage; None if
        the beam contains no allowed span.
    """
    best: list[Span | None] = []
    beams = zip(
        scores.start_logp_BK.tolist(), scores.start_BK.tolist(), scores.end_logp_BKK.tolist(), scores.end_BKK.tolist()
    )
    for window, (start_logps, starts, end_logps, ends) in zip(windows, beams):
        passage_shift = window.first - window.offset  # from positions in the row to tokens of the passage
        spans = [
            (start_logp + end_logp, start + passage_shift, end + passage_shift)
            for start_logp, start, end_logps_of_start, ends_of_start in zip(start_logps, starts, end_logps, ends)
            for end_logp, end in zip(end_logps_of_start, ends_of_start)
            if _is_allowed(window, start - window.offset, end - window.offset, max_answer)
        ]
        best.append(max(spans, default=None))
    return best


def _find(data: Path, *names: str) -> Path:
    """Return the first of `names` that is a file in `data` or in `data`/squad; raise UserError if there is none."""
    return find_file([folder / name for folder in (data, data / "squad") for name in names])


def _is_lost(question: Question) -> bool:
    """Return whether a question cannot be used for training: it has a gold answer, which is not in its passage."""
    return bool(question.answers) and question.start < 0


def _is_allowed(window: AnswerWindow, start: int, end: int, max_answer: int) -> bool:
    """Return whether a span of tokens may be an answer; `max_answer` is its greatest length in tokens.

    `start` and `end`, both included, are counted from the first passage token of the window.
    """
    is_inside = 0 <= start <= end < len(window.owned)
    return is_inside and window.owned[start] and end - start < max_answer


def _windows(
    file: SquadFile, encoder: Pretrained, settings: FinetuneConfig
) -> tuple[list[Passage], list[AnswerWindow]]:
    """Encode the passages of a file, and build the windows of all questions, in the order of the questions.

    A window is one row for the model: a question with a part of its passage.
    """
    passages = encode_passages(file.passages, encoder.tokenizer)
    queries = encoder.tokenizer.encode([question.text for question in file.questions])
    windows: list[AnswerWindow] = []
    for number, (question, query) in enumerate(zip(file.questions, queries, strict=True)):
        windows += make_windows(number, query, passages[question.passage], encoder.special, settings)
    return passages, windows
