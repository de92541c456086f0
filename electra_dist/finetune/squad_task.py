"""Make SQuAD 1.1 and 2.0 a fine-tuning task: training on windows, prediction of answer spans, official metrics.

Guarantee: the answer to a question is the span with the highest log p(start) + log p(end) over all windows of the
question (p(end) depends on the start with `head: paper`), among the model's candidates that lie in the
passage, do not end before they start and have at most `max_answer` tokens. A window may only give an answer that
starts at a token for which it has more context than the other windows. The no-answer score of a question is the lowest
no-answer logit of its windows; version 2 is scored at the official best threshold. In version 1 the no-answer output
of the paper's head is trained, too, as in google-research/electra, and ignored in prediction. The files with
predictions are those that the official scripts read: the best answer to each question, and for version 2 the no-answer
scores (`--na-prob-file`).

The rules of the metrics are those of the official scripts. An answer is lower-cased, its ASCII punctuation is deleted,
the words a, an and the are replaced by spaces, and runs of white space by one space. "Exact" means equal to one of the
gold answers. F1 compares the two bags of words; the best value over the gold answers counts. In version 2, gold
answers that are empty after normalization do not count, and a question without gold answers has the single gold answer
"". If either side has no words, F1 is 1 if both have none, else 0 (in version 1 always 0).

`best_threshold` is the official search for a no-answer threshold. A question whose no-answer score (the higher, the
less likely it has an answer) is at most the threshold gets the model's answer; the others get "".

Source: google-research/electra, finetune/qa/qa_metrics.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import find_file
from electra_dist.finetune.passage_windows import (
    AnswerWindow,
    Passage,
    Question,
    SquadFile,
    encode_passages,
    make_windows,
    read_squad,
    window_target,
)
from electra_dist.finetune.task import Task, TaskOutcome, TextFile
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular

if TYPE_CHECKING:
    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.finetune.models import AnswerModel, SpanScores, TaskModel
    from electra_dist.finetune.training_loop import Examples, Progress
    from electra_dist.pretrained.encoder import Pretrained

Span = tuple[float, int, int]  # (log-probability, first token, last token), tokens numbered within the passage
Gold = Mapping[str, Sequence[str]]  # question id -> gold answers; empty for a question without an answer

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(answer: str) -> str:
    """Return an answer in the form in which answers are compared: "The U.S.  army" becomes "us army"."""
    without_punctuation = answer.lower().translate(_PUNCTUATION)
    without_articles = _ARTICLES.sub(" ", without_punctuation)
    return " ".join(without_articles.split())


def exact(predicted: str, gold: str) -> float:
    """Return 1.0 if both answers are equal after normalization, else 0.0."""
    return float(normalized(predicted) == normalized(gold))


def f1(predicted: str, gold: str, version: int) -> float:
    """Return the F1, in [0, 1], of two answers' words; two empty answers give 1 in version 2, and 0 in version 1."""
    predicted_words = normalized(predicted).split()
    gold_words = normalized(gold).split()
    is_one_empty = not predicted_words or not gold_words
    if version == 2 and is_one_empty:
        return float(predicted_words == gold_words)  # 1 if both are empty
    # The intersection of two counters has each word as often as both answers have it.
    num_common = (Counter(predicted_words) & Counter(gold_words)).total()
    if num_common == 0:
        return 0.0
    precision = num_common / len(predicted_words)
    recall = num_common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def squad1_metrics(predicted: Mapping[str, str], gold: Gold) -> dict[str, float]:
    """Return the metrics of SQuAD 1.1 in per cent: `exact` (share of exact matches) and `f1` (mean F1 of the words).

    A question without a prediction counts as wrong.
    """
    return {
        "exact": _mean_score(predicted, gold, score=exact),
        "f1": _mean_score(predicted, gold, score=partial(f1, version=1)),
    }


def squad2_metrics(predicted: Mapping[str, str], no_answer: Mapping[str, float], gold: Gold) -> dict[str, float]:
    """Return the metrics of SQuAD 2.0; scores are in per cent.

    `best_exact` and `best_f1` are the scores at the no-answer threshold that is best for each, and
    `best_exact_threshold` and `best_f1_threshold` are these thresholds. `has_answer_exact` and `has_answer_f1` are the
    scores over the questions that have an answer, with every question answered. `predicted` has the model's best
    answer to every question, even if it seems to have none; `no_answer` has the no-answer scores.
    """
    answerable_questions = [question for question in gold if gold[question]]
    # Gold answers that normalize to "" do not count; "" is the gold answer of a question that has no others.
    scored_gold = {}
    for question, answers in gold.items():
        non_empty_answers = [answer for answer in answers if normalized(answer)]
        scored_gold[question] = non_empty_answers or [""]

    metrics: dict[str, float] = {}
    for name, score in (("exact", exact), ("f1", partial(f1, version=2))):
        scores = {question: _best_score(predicted[question], scored_gold[question], score) for question in gold}
        best_score, threshold = best_threshold(scores, predicted, no_answer, gold)
        metrics[f"best_{name}"] = best_score
        metrics[f"best_{name}_threshold"] = threshold
        answerable_total = sum(scores[question] for question in answerable_questions)
        metrics[f"has_answer_{name}"] = 100.0 * answerable_total / max(1, len(answerable_questions))
    return metrics


def best_threshold(
    scores: Mapping[str, float], predicted: Mapping[str, str], no_answer: Mapping[str, float], gold: Gold
) -> tuple[float, float]:
    """Return the best mean score in per cent, and its no-answer threshold, found as the official script does.

    The search starts with "" as the prediction for every question, which is right for the questions without an answer.
    Then it gives the model's answer to one question after the other, from the lowest no-answer score on. The threshold
    is the no-answer score of the question at which the mean is highest, or 0 if answers never improve the mean.
    `scores` are those of the model's answers, in [0, 1].
    """
    num_unanswerable = sum(not answers for answers in gold.values())
    total = float(num_unanswerable)
    best_total = total
    threshold = 0.0
    for question in sorted(no_answer, key=lambda question: no_answer[question]):
        if gold[question]:
            total += scores[question]
        elif predicted[question]:  # a prediction of "" stays right
            total -= 1
        if total > best_total:
            best_total = total
            threshold = no_answer[question]
    return 100.0 * best_total / len(gold), threshold


def _mean_score(predicted: Mapping[str, str], gold: Gold, score: Callable[[str, str], float]) -> float:
    """Return the mean of `score` over all questions, in per cent; a question without a prediction counts as 0."""
    scores = [_best_score(predicted[question], gold[question], score) for question in gold if question in predicted]
    return 100.0 * sum(scores) / len(gold)


def _best_score(predicted: str, gold: Sequence[str], score: Callable[[str, str], float]) -> float:
    return max(score(predicted, answer) for answer in gold)


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
    """Return whether the tokens from `start` to `end` may be the answer; 0 is the window's first passage token."""
    is_inside = 0 <= start <= end < len(window.owned)
    if not is_inside:
        return False
    num_tokens = end - start + 1
    return window.owned[start] and num_tokens <= max_answer


_LABELS = {1: "v1.1", 2: "v2.0"}  # the version in the names of the official files


class SquadTask(Task):
    """Question answering on SQuAD, scored by the official F1 in per cent; for 2.0, at the best no-answer threshold."""

    unit = 0.01

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
        self.data = {"version": version}
        num_lost = sum(_is_lost(question) for question in self.train.questions)
        self.notes = []
        for file, content in ((train_file, self.train), (dev_file, self.dev)):
            self.notes += content.remarks(file)
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
        import torch

        from electra_dist.finetune.training_loop import Examples

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
        from electra_dist.finetune.models import LinearSpanModel, StockNetwork, labels_config

        if settings.head == "paper":
            from electra_dist.finetune.paper_heads import PaperSpanModel

            return PaperSpanModel(encoder, settings, seed)
        # Version 5 of transformers has dropout before ModernBERT's head, ELECTRA's class never had.
        config = {"classifier_dropout": 0.0, **labels_config(["START", "END"])}
        network = StockNetwork(encoder, "QuestionAnswering", config, settings, seed)
        return LinearSpanModel(network, encoder.special, settings.beam)

    @override
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        return score_answers(self.version, self.dev, find_answers(model, self.dev, encoder, settings, progress))


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


class Answers(NamedTuple):
    """Answers of a model to the questions of a file; the keys of both dicts are the questions' numbers, from 0."""

    passages: list[Passage]
    best: dict[int, Span]  # the best span of tokens; no entry if no span is allowed, as in an empty passage
    no_answer: dict[int, float]  # the higher, the less likely there is an answer; no entry for an empty passage

    def text(self, number: int, question: Question) -> str:
        """Return the text of the answer to a question, or "" if no span was found."""
        if number not in self.best:
            return ""
        _, first_token, last_token = self.best[number]
        return self.passages[question.passage].answer(first_token, last_token)


def find_answers(
    model: TaskModel, file: SquadFile, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
) -> Answers:
    """Let a model answer all questions of a file: each gets its best span of tokens, and a logit of "no answer".

    A long passage is read in overlapping windows. The span is the most probable one of all windows, the logit the
    lowest. `progress` is called with ("predict", windows done, windows in total).
    """
    from electra_dist.finetune.models import AnswerModel
    from electra_dist.finetune.training_loop import predict

    assert isinstance(model, AnswerModel)
    passages, windows = _windows(file, encoder, settings)
    answers = Answers(passages, {}, {})
    device = next(model.parameters()).device
    ids = [window.ids for window in windows]
    for rows, scores in predict(model.search, ids, encoder.special.pad, settings.batch, device, progress):
        batch_windows = [windows[row] for row in rows]
        spans = best_spans(batch_windows, scores, settings.max_answer)
        for window, span, logit in zip(batch_windows, spans, scores.no_answer_B.tolist(), strict=True):
            question = window.question
            answers.no_answer[question] = min(answers.no_answer.get(question, logit), logit)
            # Spans are compared by their log-probability first, then by their tokens.
            if span is not None and (question not in answers.best or span > answers.best[question]):
                answers.best[question] = span
    return answers


def score_answers(version: int, file: SquadFile, answers: Answers) -> TaskOutcome:
    """Compute the official metrics of SQuAD `version` from the answers to the questions of a file.

    Without a span the answer is ""; without a logit, as for an empty passage, the logit is 0. The outcome counts as
    failed if every predicted answer is "" or, in version 2, if no no-answer threshold gives a better F1 than leaving
    all questions unanswered.
    """
    predicted = {question.id: answers.text(number, question) for number, question in enumerate(file.questions)}
    gold = {question.id: question.answers for question in file.questions}
    failures: tuple[str, ...] = ()
    if not any(predicted.values()):
        failures = ("degenerate: no question has an answer",)
    files: tuple[TextFile, ...] = (TextFile("predictions.json", _json_text(predicted)),)
    if version == 1:
        from electra_dist.finetune.stored_scores import ItemResults
        from electra_dist.finetune.task_metrics import resampled

        score = partial(f1, version=1)
        f1_N = 100.0 * np.array([_best_score(predicted[name], answers, score) for name, answers in gold.items()])
        values = resampled(len(f1_N), lambda rows: float(f1_N[rows].mean()))
        metrics = squad1_metrics(predicted, gold)
        return TaskOutcome(metrics, failures, files, float(np.std(values)), ItemResults(resamples=values))

    no_answer = {question.id: answers.no_answer.get(number, 0.0) for number, question in enumerate(file.questions)}
    metrics = squad2_metrics(predicted, no_answer, gold)
    num_unanswerable = sum(not answers for answers in gold.values())
    score_without_answers = 100.0 * num_unanswerable / len(gold)
    if metrics["best_f1"] <= score_without_answers:
        failures = ("degenerate: no threshold beats `no answer` to every question",)
    files += (TextFile("null_odds.json", _json_text(no_answer)),)
    return TaskOutcome(metrics, failures, files)
