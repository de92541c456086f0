"""SQuAD files to windows of ids, and spans of tokens back to characters.

Guarantee: the windows of a passage cover each of its tokens, neighbours start `doc_stride` tokens apart, and each
token belongs to one window: the one where the smaller of its contexts to both sides is largest (the reference's
`max context`). An answer is the characters of the passage from the first token's first to the last token's last, so
what a model predicts is text of the file, not of the vocabulary.

Training takes the first gold answer; where the text at `answer_start` is another one, the nearest place where the
answer stands; a question whose answer is nowhere in the passage is left out and counted.

Source: google-research/electra, finetune/qa/qa_tasks.py, which goes by words and a heuristic; offsets are exact.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from electra_dist.errors import UserError
from electra_dist.finetune.config import FinetuneConfig
from electra_dist.model.rows import SpecialIds
from electra_dist.tokenizer import WordPieceTokenizer


class Question(NamedTuple):
    """One question of a file."""

    id: str
    text: str
    passage: int  # number of its passage
    answers: tuple[str, ...]  # gold; empty where there is none
    start: int  # first character of the first answer in the passage; -1 where it is not to be found


class SquadFile(NamedTuple):
    """Passages and questions."""

    passages: list[str]
    questions: list[Question]


class Passage(NamedTuple):
    """A passage in tokens."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]  # characters of each token

    def answer(self, first: int, last: int) -> str:
        """The text from token `first` to token `last`, with combining marks that a tokenizer strips."""
        start, end = self.offsets[first][0], self.offsets[last][1]
        while end < len(self.text) and unicodedata.category(self.text[end]) == "Mn":
            end += 1
        return self.text[start:end]

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """First and last token that touch the characters [start, end); last < first where none does."""
        touching = [i for i, (left, right) in enumerate(self.offsets) if left < end and right > start]
        return (touching[0], touching[-1]) if touching else (0, -1)


class AnswerWindow(NamedTuple):
    """`[CLS] question [SEP] part of the passage [SEP]`."""

    question: int  # number within the file
    ids: list[int]
    offset: int  # position in `ids` of the first token of the passage
    first: int  # number of that token in the passage
    owned: list[bool]  # for each token of the part: this window is where it has most context


def read_squad(file: Path, version: int) -> SquadFile:
    """All questions of a SQuAD JSON file.

    Raises:
        UserError: it is none, or of the other version.
    """
    try:
        articles = json.loads(file.read_text("utf-8"))["data"]
        passages: list[str] = []
        questions: list[Question] = []
        for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
            context = paragraph["context"]
            for entry in paragraph["qas"]:
                questions.append(_question(entry, len(passages), context, version))
            passages.append(context)
    except (ValueError, KeyError, TypeError) as error:
        what = f"no key {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{file}: not a SQuAD {version} file: {what}") from None
    if not questions:
        raise UserError(f"{file}: no questions; give a SQuAD {version} file")
    return SquadFile(passages, questions)


def _question(entry: dict[str, Any], passage: int, context: str, version: int) -> Question:
    impossible = version == 2 and entry["is_impossible"]
    if not impossible and not entry["answers"]:
        raise ValueError(f"question {entry['id']} has no answer")
    answers = () if impossible else tuple(answer["text"] for answer in entry["answers"])
    start = _place(context, answers[0], entry["answers"][0]["answer_start"]) if answers else -1
    return Question(entry["id"], entry["question"], passage, answers, start)


def _place(context: str, answer: str, start: int) -> int:
    """Where `answer` stands in `context`: at `start`, or as near to it as there is one, or -1."""
    if context.startswith(answer, start):
        return start
    before, after = context.rfind(answer, 0, start + len(answer)), context.find(answer, start)
    found = [place for place in (before, after) if place >= 0]
    return min(found, key=lambda place: abs(place - start), default=-1)


def encode_passages(texts: Sequence[str], tokenizer: WordPieceTokenizer) -> list[Passage]:
    """Each passage in tokens."""
    return [Passage(text, *tokenizer.encode_with_offsets(text)) for text in texts]


def make_windows(
    number: int, query: Sequence[int], passage: Passage, special: SpecialIds, settings: FinetuneConfig
) -> list[AnswerWindow]:
    """The windows of question `number`, whose ids are `query`; none for a passage without tokens."""
    query = query[: settings.max_query]
    room = settings.max_length - len(query) - 3
    if room < 1:
        raise UserError(
            f"max_length {settings.max_length} leaves no room beside a question; raise it or cut max_query"
        )
    spans = window_spans(len(passage.ids), room, settings.doc_stride)
    owner = [_owner(spans, token) for token in range(len(passage.ids))] if spans[1:] else [0] * len(passage.ids)
    head = [special.cls, *query, special.sep]
    return [
        AnswerWindow(
            number,
            [*head, *passage.ids[start:end], special.sep],
            len(head),
            start,
            [owner[token] == window for token in range(start, end)],
        )
        for window, (start, end) in enumerate(spans)
    ]


def window_spans(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Tokens [start, end) of each window of at most `room`."""
    spans = []
    start = 0
    while start < num_tokens:
        end = min(start + room, num_tokens)
        spans.append((start, end))
        if end == num_tokens:
            break
        start += min(end - start, stride)
    return spans


def window_target(window: AnswerWindow, first: int, last: int, impossible: bool) -> tuple[int, int, int]:
    """(start, end, 1 if there is no answer) in a window; [CLS] where the answer's tokens are not all in it."""
    end = window.first + len(window.owned)
    if impossible or not window.first <= first <= last < end:
        return 0, 0, int(impossible)
    shift = window.offset - window.first
    return first + shift, last + shift, 0


def _owner(spans: Sequence[tuple[int, int]], token: int) -> int:
    """The window in which `token` has most context; the first one of equals."""

    def context(window: int) -> float:
        start, end = spans[window]
        return min(token - start, end - 1 - token) + 0.01 * (end - start)

    return max((w for w, (start, end) in enumerate(spans) if start <= token < end), key=context)
