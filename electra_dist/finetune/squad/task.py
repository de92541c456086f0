"""SQuAD 1.1 and 2.0 as a task: windows in, the official scores out.

Guarantee: the answer to a question is the best span over its windows by log p(start) + log p(end | start), among the
beam's spans that lie in the passage, start where the window is the token's own, do not end before they start and have
at most `max_answer` tokens. Its no-answer score is the smallest logit of its windows; version 2 is scored at the
official best threshold. Version 1 trains the answerability head too, as the reference does, and ignores it.

Source: google-research/electra, finetune/qa/qa_metrics.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from electra_dist.finetune.config import FinetuneConfig
from electra_dist.finetune.fit import Examples, Progress, predict
from electra_dist.finetune.heads import SpanModel, SpanScores, TaskModel
from electra_dist.finetune.squad.metrics import squad1_metrics, squad2_metrics
from electra_dist.finetune.squad.windows import (
    AnswerWindow,
    Passage,
    SquadFile,
    encode_passages,
    make_windows,
    read_squad,
    window_target,
)
from electra_dist.finetune.tasks import Task, TaskOutcome
from electra_dist.finetune.texts import find_file
from electra_dist.pretrained.encoder import Pretrained

Span = tuple[float, int, int]  # log probability, first and last token of the passage


class SquadTask(Task):
    """Questions on passages."""

    def __init__(self, version: int, data: Path) -> None:
        """Reads {train,dev}-vN.json, or dev-vN.split-{train,heldout}.json, in `data` or `data`/squad."""
        self.version, self.name = version, f"squad{version}"
        self.metric = "f1" if version == 1 else "best_f1"
        label = {1: "v1.1", 2: "v2.0"}[version]
        files = [
            find_file([folder / name for folder in (data, data / "squad") for name in names])
            for names in (
                (f"train-{label}.json", f"dev-{label}.split-train.json"),
                (f"dev-{label}.json", f"dev-{label}.split-heldout.json"),
            )
        ]
        self.train, self.dev = (read_squad(file, version) for file in files)
        self.digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        lost = sum(bool(question.answers) and question.start < 0 for question in self.train.questions)
        self.notes = [f"{files[0]}: {lost} questions whose answer is not in the passage are left out"] if lost else []

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Every window of every question whose answer is in its passage."""
        passages, windows = _windows(self.train, encoder, settings)
        ids, targets = [], []
        for window in windows:
            question = self.train.questions[window.question]
            if question.answers and question.start < 0:
                continue
            first, last = 0, -1
            if question.answers:
                end = question.start + len(question.answers[0])
                first, last = passages[question.passage].tokens(question.start, end)
            ids.append(window.ids)
            targets.append(window_target(window, first, last, impossible=not question.answers))
        return Examples(ids, torch.tensor(targets))

    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> SpanModel:
        """A span model."""
        backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        return SpanModel(backbone, encoder.tower.hidden_size, settings, seed)

    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Official metrics on the development file."""
        assert isinstance(model, SpanModel)
        passages, windows = _windows(self.dev, encoder, settings)
        device = next(model.parameters()).device
        best: dict[int, Span] = {}
        no_answer: dict[int, float] = {}
        ids = [window.ids for window in windows]
        for rows, scores in predict(model.search, ids, encoder.special.pad, settings.batch, device, progress):
            for window, span, logit in zip(
                (windows[row] for row in rows),
                best_spans([windows[row] for row in rows], scores, settings.max_answer),
                scores.no_answer_B.tolist(),
            ):
                question = window.question
                no_answer[question] = min(no_answer.get(question, logit), logit)
                if span is not None and (question not in best or span > best[question]):
                    best[question] = span
        return self.score(passages, best, no_answer)

    def score(self, passages: Sequence[Passage], best: dict[int, Span], no_answer: dict[int, float]) -> TaskOutcome:
        """Official metrics of the best span and the no-answer logit of each question of the development file."""
        predicted, scores = {}, {}
        for number, question in enumerate(self.dev.questions):
            span = best.get(number)
            predicted[question.id] = passages[question.passage].answer(*span[1:]) if span else ""
            scores[question.id] = no_answer.get(number, 0.0)
        gold = {question.id: question.answers for question in self.dev.questions}
        failure = "" if any(predicted.values()) else "degenerate: no question has an answer"
        if self.version == 1:
            return TaskOutcome(squad1_metrics(predicted, gold), failure)
        metrics = squad2_metrics(predicted, scores, gold)
        if metrics["best_f1"] <= 100.0 * sum(not answers for answers in gold.values()) / len(gold):
            failure = "degenerate: no threshold beats `no answer` to every question"
        return TaskOutcome(metrics, failure)


def best_spans(windows: Sequence[AnswerWindow], scores: SpanScores, max_answer: int) -> list[Span | None]:
    """The best allowed span of each window's beam, in tokens of the passage; None where the beam holds none."""
    found: list[Span | None] = []
    tables = [tensor.tolist() for tensor in scores[:4]]
    for window, start_logps, starts, end_logps, ends in zip(windows, *tables):
        spans = [
            (start_logp + end_logp, start, end)
            for start_logp, start, logps, stops in zip(start_logps, starts, end_logps, ends)
            for end_logp, end in zip(logps, stops)
            if _allowed(window, start - window.offset, end - window.offset, max_answer)
        ]
        shift = window.first - window.offset
        logp, start, end = max(spans, default=(0.0, -1, -1))
        found.append((logp, start + shift, end + shift) if start >= 0 else None)
    return found


def _allowed(window: AnswerWindow, start: int, end: int, max_answer: int) -> bool:
    inside = 0 <= start <= end < len(window.owned)
    return inside and window.owned[start] and end - start < max_answer


def _windows(
    file: SquadFile, encoder: Pretrained, settings: FinetuneConfig
) -> tuple[list[Passage], list[AnswerWindow]]:
    passages = encode_passages(file.passages, encoder.tokenizer)
    queries = encoder.tokenizer.encode([question.text for question in file.questions])
    windows: list[AnswerWindow] = []
    for number, (question, query) in enumerate(zip(file.questions, queries, strict=True)):
        windows += make_windows(number, query, passages[question.passage], encoder.special, settings)
    return passages, windows
