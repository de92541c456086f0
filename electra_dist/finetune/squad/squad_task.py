"""Make SQuAD 1.1 and 2.0 a fine-tuning task: training on windows, prediction of answer spans, official metrics.

Guarantee: the answer to a question is the span with the highest log p(start) + log p(end) over all windows of the
question (p(end) depends on the start with `span_head: reference`), among the model's candidates that lie in the
passage, do not end before they start and have at most `max_answer` tokens. A window may only give an answer that
starts at a token for which it has more context than the other windows. The no-answer score of a question is the lowest
no-answer logit of its windows; version 2 is scored at the official best threshold. In version 1 the no-answer output
of the reference's head is trained, too, as in google-research/electra, and ignored in prediction. The files with
predictions are those that the official scripts read: the best answer to each question, and for version 2 the no-answer
scores (`--na-prob-file`).

Source: google-research/electra, finetune/qa/qa_metrics.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.output.hf_heads import span_head
from electra_dist.finetune.output.text_files import TextFile
from electra_dist.finetune.squad.answer_spans import Span, best_spans
from electra_dist.finetune.squad.linear_span_head import LinearSpanModel
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
from electra_dist.finetune.squad.span_head import AnswerModel, SpanModel
from electra_dist.finetune.squad.squad_metrics import squad1_metrics, squad2_metrics
from electra_dist.finetune.task import Task, TaskOutcome
from electra_dist.finetune.task_heads import TaskModel, new_features
from electra_dist.finetune.texts.labelled_texts import find_file
from electra_dist.finetune.training_loop import Examples, Progress, predict
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import TaskHead
from electra_dist.store.regular_files import MOST_DATA_BYTES, read_regular

_LABELS = {1: "v1.1", 2: "v2.0"}  # the version in the names of the official files


class SquadTask(Task):
    """Question answering on SQuAD, scored by the official F1 in per cent; for 2.0, at the best no-answer threshold."""

    def __init__(self, version: int, data: Path) -> None:
        """Read SQuAD `version` 1 or 2 from the folder `data` or `data`/squad; `self.notes` lists what was left out."""
        self.version = version
        self.name = f"squad{version}"
        self.metric = "f1" if version == 1 else "best_f1"
        label = _LABELS[version]
        train_file = _find(data, f"train-{label}.json", f"dev-{label}.split-train.json")
        dev_file = _find(data, f"dev-{label}.json", f"dev-{label}.split-heldout.json")
        self.train = read_squad(train_file, version)
        self.dev = read_squad(dev_file, version, unique_ids=True)
        train_bytes, dev_bytes = (read_regular(file, MOST_DATA_BYTES) for file in (train_file, dev_file))
        self.digest = hashlib.sha256(train_bytes + dev_bytes).hexdigest()
        num_lost = sum(_is_lost(question) for question in self.train.questions)
        self.notes = []
        for file, content in ((train_file, self.train), (dev_file, self.dev)):
            for reason, numbers in content.left_out.items():
                self.notes.append(
                    f"{file}: {len(numbers)} questions are left out, because {reason}; first: question {numbers[0]}"
                )
        if num_lost == len(self.train.questions):
            raise UserError(
                f"{train_file}: no answer is in the passage of its question; replace it with a SQuAD {version} file"
            )
        if num_lost > 0:
            self.notes.append(f"{train_file}: {num_lost} questions whose answer is not in the passage are left out")

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Return the windows of all training questions as rows of token ids, with their targets from `window_target`.

        If a question has several gold answers, the first one is the target. Questions whose answer does not occur in
        the passage are left out.
        """
        passages, windows = _windows(self.train, encoder, settings)
        ids = []
        targets = []
        for window in windows:
            question = self.train.questions[window.question]
            if _is_lost(question):
                continue
            if question.answers:
                answer_end = question.start + len(question.answers[0])
                first_token, last_token = passages[question.passage].tokens(question.start, answer_end)
                target = window_target(window, first_token, last_token, impossible=False)
            else:
                target = window_target(window, first=0, last=-1, impossible=True)  # an empty span of tokens
            ids.append(window.ids)
            targets.append(target)
        return Examples(ids=ids, target_NK=torch.tensor(targets))

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> AnswerModel:
        backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        width = encoder.tower.hidden_size
        if settings.span_head == "linear":
            return LinearSpanModel(backbone, width, settings, seed, new_features(encoder, seed))
        return SpanModel(backbone, width, settings, seed)

    def hf_head(self, model: TaskModel, settings: FinetuneConfig) -> TaskHead | None:
        """Return a linear head under Hugging Face's names; None for the reference's head, which Hugging Face lacks."""
        if isinstance(model, LinearSpanModel):
            return span_head(model.head)
        return None

    @override
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        assert isinstance(model, AnswerModel)
        passages, windows = _windows(self.dev, encoder, settings)
        device = next(model.parameters()).device
        best: dict[int, Span] = {}  # number of a question -> its best span so far
        no_answer: dict[int, float] = {}  # number of a question -> its lowest no-answer logit so far
        ids = [window.ids for window in windows]
        for rows, scores in predict(model.search, ids, encoder.special.pad, settings.batch, device, progress):
            batch_windows = [windows[row] for row in rows]
            spans = best_spans(batch_windows, scores, settings.max_answer)
            no_answer_logits = scores.no_answer_B.tolist()
            for window, span, logit in zip(batch_windows, spans, no_answer_logits):
                question = window.question
                no_answer[question] = min(no_answer.get(question, logit), logit)
                if span is None:
                    continue
                # Spans are compared by their log-probability first, then by their tokens.
                if question not in best or span > best[question]:
                    best[question] = span
        return self.score(passages, best, no_answer)

    def score(self, passages: Sequence[Passage], best: dict[int, Span], no_answer: dict[int, float]) -> TaskOutcome:
        """Compute the official metrics on the development questions from the predicted spans.

        `best` and `no_answer` map a question's number to its best span and its no-answer logit. Without a span the
        answer is ""; without a logit, as for an empty passage, the logit is 0. The outcome counts as failed if every
        predicted answer is "" or, in version 2, if no no-answer threshold gives a better F1 than leaving all questions
        unanswered.
        """
        predicted: dict[str, str] = {}
        no_answer_scores: dict[str, float] = {}
        gold: dict[str, tuple[str, ...]] = {}
        for number, question in enumerate(self.dev.questions):
            predicted[question.id] = ""
            if number in best:
                _, first_token, last_token = best[number]
                predicted[question.id] = passages[question.passage].answer(first_token, last_token)
            no_answer_scores[question.id] = no_answer.get(number, 0.0)
            gold[question.id] = question.answers

        failures: tuple[str, ...] = ()
        if not any(predicted.values()):
            failures = ("degenerate: no question has an answer",)
        files: tuple[TextFile, ...] = (TextFile("predictions.json", _json_text(predicted)),)
        if self.version == 1:
            return TaskOutcome(squad1_metrics(predicted, gold), failures, files)

        metrics = squad2_metrics(predicted, no_answer_scores, gold)
        num_unanswerable = sum(not answers for answers in gold.values())
        score_without_answers = 100.0 * num_unanswerable / len(gold)
        if metrics["best_f1"] <= score_without_answers:
            failures = ("degenerate: no threshold beats `no answer` to every question",)
        files += (TextFile("null_odds.json", _json_text(no_answer_scores)),)
        return TaskOutcome(metrics, failures, files)


def _json_text(values: Mapping[str, str] | Mapping[str, float]) -> str:
    """Return values by question id as JSON text, in the form that the official SQuAD scripts read."""
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


def _find(data: Path, *names: str) -> Path:
    candidates = [folder / name for folder in (data, data / "squad") for name in names]
    return find_file(candidates)


def _is_lost(question: Question) -> bool:
    """Return whether a question has a gold answer that does not occur in its passage, and so is not trained on."""
    return bool(question.answers) and question.start < 0


def _windows(
    file: SquadFile, encoder: Pretrained, settings: FinetuneConfig
) -> tuple[list[Passage], list[AnswerWindow]]:
    """Return the tokenized passages of a file, and the windows of all questions in the order of the questions."""
    passages = encode_passages(file.passages, encoder.tokenizer)
    question_ids = encoder.tokenizer.encode([question.text for question in file.questions])
    windows: list[AnswerWindow] = []
    for number, question in enumerate(file.questions):
        passage = passages[question.passage]
        windows += make_windows(number, question_ids[number], passage, encoder.special, settings)
    return passages, windows
