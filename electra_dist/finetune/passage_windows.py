"""Turn SQuAD files into windows of token ids, and spans of tokens back into text of the passage.

Guarantee: the windows of a passage together cover every token, and neighbouring windows start `doc_stride` tokens
apart. Each token is owned by one window, the only one that may predict an answer that starts there. It is the window
with the most context: the number of tokens to the left or to the right, whichever is smaller, is largest (`max
context` in google-research/electra). An answer is the text of the passage from the first character of its first token
to the last character of its last token, so a prediction is text of the file, not of the vocabulary.

Each question is used, or left out and counted with a reason; one that cannot be used does not end the others.
Training uses the first gold answer. If the text at `answer_start` differs from it, the nearest occurrence in the
passage is used; a question whose answer does not occur in the passage is left out of training and counted.

Source: google-research/electra, finetune/qa/qa_tasks.py, which aligns answers with tokens by words and a heuristic.
This module uses the character offsets of the tokens instead, which are exact.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from electra_dist.corpus.counts import remarks_on_texts
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular, readable
from electra_dist.store.json_file import DamagedJson, parse_json, validate_json
from electra_dist.tables import NotText, as_name, as_text

if TYPE_CHECKING:
    from electra_kernels.operation_types import SpecialIds

    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.tokenizer import TextTokenizer


class Question(NamedTuple):
    """Question of a SQuAD file, with the number of its passage and its gold answers."""

    id: str
    text: str
    passage: int  # number of its passage in the file, counted from 0
    answers: tuple[str, ...]  # gold answers; empty for a question without an answer
    start: int  # index in the passage of the first character of answers[0]; -1 if it does not occur there


class SquadFile(NamedTuple):
    """Contents of a SQuAD file: all passages, and the questions that can be used."""

    passages: list[str]
    questions: list[Question]
    left_out: dict[str, list[int]]  # reason -> numbers of the questions in the file, from 1, that are left out for it

    def remarks(self, file: Path) -> list[str]:
        """Return a line on the questions of `file` that are left out for each reason, and on passages of no text."""
        lines = [
            f"{file}: {len(numbers)} questions are left out, because {reason}; first: question {numbers[0]}"
            for reason, numbers in self.left_out.items()
        ]
        return lines + remarks_on_texts(str(file), self.passages)


class Passage(NamedTuple):
    """Passage of a SQuAD file, as text and as tokens."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]  # [start, end) of each token, in characters of the text

    def answer(self, first: int, last: int) -> str:
        """Return the text of the passage from token `first` to token `last`, both included.

        Combining marks that follow the last token (such as the accent of a decomposed character) are included: the
        tokenizer strips them, so no token covers them.
        """
        start, _ = self.offsets[first]
        _, end = self.offsets[last]
        while end < len(self.text) and unicodedata.category(self.text[end]) == "Mn":  # nonspacing mark
            end += 1
        return self.text[start:end]

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last token number that overlap the characters [start, end); (0, -1) if none do."""
        spans = enumerate(self.offsets)
        overlapping = [number for number, (first, behind) in spans if first < end and behind > start]
        return (overlapping[0], overlapping[-1]) if overlapping else (0, -1)


class AnswerWindow(NamedTuple):
    """Row for the model, `[CLS] question [SEP] part of the passage [SEP]`; the windows of a passage overlap."""

    question: int  # index of the question in `SquadFile.questions`
    ids: list[int]
    offset: int  # position in `ids` of the first passage token of the window
    first: int  # number of that token within the passage
    owned: list[bool]  # for each passage token of the window: whether this window has the most context for it


class _Paragraph(TypedDict):
    """Passage of a SQuAD file with its questions; the types of the values are checked later, question by question."""

    context: object
    qas: list[object]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class _Squad(TypedDict):
    data: list[_Article]


_SQUAD = TypeAdapter(_Squad)
_LIST = TypeAdapter(list[Any])


class _LeftOut(Exception):
    """Error: a question of the file cannot be used; the message is the reason, one of a few fixed texts."""


def read_squad(file: Path, version: int, unique_ids: bool = False, is_marked: bool = False) -> SquadFile:
    """Read all passages and questions of a SQuAD JSON file; questions that cannot be used are left out and counted.

    `version` is 1 or 2; only in version 2 may a question have no answer. With `unique_ids`, a question whose id has
    occurred before is left out, because predictions are stored by id. With `is_marked`, questions of version 2 need
    no `is_impossible`. Raises UserError if no question is left, or the file has another format.
    """
    try:
        with readable(file):
            content = read_regular(file, MOST_DATA_BYTES)
        articles = validate_json(_SQUAD, parse_json(content))["data"]
    except DamagedJson as error:
        raise _other_format(file, version, str(error)) from None
    result = SquadFile([], [], {})
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    number = 0
    ids: set[str] = set()
    for passage_number, paragraph in enumerate(paragraphs):
        passage_text = _text_or_none(paragraph["context"])
        result.passages.append(passage_text or "")
        for entry in paragraph["qas"]:
            number += 1
            try:
                question = _parse_question(entry, passage_number, passage_text, version)
                if unique_ids and question.id in ids:
                    raise _LeftOut("they have the id of an earlier question")
            except _LeftOut as reason:
                result.left_out.setdefault(str(reason), []).append(number)
            else:
                ids.add(question.id)
                result.questions.append(question)
    if not result.questions:
        reasons = "".join(f", {len(numbers)} left out because {reason}" for reason, numbers in result.left_out.items())
        raise UserError(f"{file}: no questions{reasons}; replace it with a SQuAD {version} file that has some")
    needs_marks = version == 2 and not is_marked and all(question.answers for question in result.questions)
    if needs_marks and not any(_is_marked(entry) for paragraph in paragraphs for entry in paragraph["qas"]):
        raise _other_format(file, version, "no key 'is_impossible'")
    return result


def _is_marked(entry: object) -> bool:
    """Return whether an entry of a file says by `is_impossible`, as in version 2, whether it has an answer."""
    return isinstance(entry, dict) and "is_impossible" in entry


def _other_format(file: Path, version: int, reason: str) -> UserError:
    return UserError(
        f"{file}: not a SQuAD {version} file: {reason}; replace it with the official file of this version"
    )


def _parse_question(entry: object, passage: int, passage_text: str | None, version: int) -> Question:
    """Convert an entry of a passage's list `qas` into a `Question`; raise _LeftOut with the reason if that fails."""
    if passage_text is None:
        raise _LeftOut("their passage is no text")
    if not isinstance(entry, dict):
        raise _LeftOut("they are no JSON objects")
    try:
        question_id = as_name(entry.get("id"))
        text = as_text(entry.get("question"))
    except NotText:
        raise _LeftOut("their id or question is no text") from None
    is_impossible = entry.get("is_impossible")
    if is_impossible not in (None, False, True):
        raise _LeftOut("their is_impossible is neither true nor false")
    # In version 2 a question that is marked `is_impossible` has no gold answers, as in the official script.
    answers = [] if version == 2 and is_impossible else _parse_answers(entry.get("answers") or [])
    if not answers and version == 1:
        raise _LeftOut("they have no answer")
    start = _nearest_occurrence(passage_text, *answers[0]) if answers else -1
    return Question(question_id, text, passage, tuple(answer for answer, _ in answers), start)


def _parse_answers(answers: object) -> list[tuple[str, int]]:
    """Return the non-empty gold answers, each with its `answer_start`; a negative start becomes 0."""
    parsed = []
    try:
        for answer in validate_json(_LIST, answers):
            text, start = as_text(answer["text"]), int(answer["answer_start"])
            if text.strip():
                parsed.append((text, max(start, 0)))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _LeftOut("their answers are no list of texts, each with the number answer_start") from None
    return parsed


def _text_or_none(value: object) -> str | None:
    try:
        return as_text(value)
    except NotText:
        return None


def _nearest_occurrence(passage_text: str, answer: str, start: int) -> int:
    """Return the index at which `answer` occurs nearest to `start`, or -1 if it does not occur.

    If two occurrences are equally near, the lower index is returned.
    """
    if passage_text.startswith(answer, start):
        return start
    last_before = passage_text.rfind(answer, 0, start + len(answer))
    first_after = passage_text.find(answer, start)
    occurrences = [index for index in (last_before, first_after) if index >= 0]  # -1 means not found
    return min(occurrences, key=lambda index: abs(index - start), default=-1)


def encode_passages(texts: Sequence[str], tokenizer: TextTokenizer) -> list[Passage]:
    """Tokenize each passage, without special tokens or truncation; each token keeps its range of characters."""
    return [Passage(text, *tokenizer.encode_with_offsets(text)) for text in texts]


def make_windows(
    number: int, query: Sequence[int], passage: Passage, special: SpecialIds, settings: FinetuneConfig
) -> list[AnswerWindow]:
    """Build the windows of one question, in the order of the passage; an empty passage has no windows.

    `number` is the question's index in `SquadFile.questions`. `query` has its token ids, without special tokens, of
    which only the first `max_query` are used. Raises UserError if the question leaves no room for the passage in
    `max_length` tokens.
    """
    question_ids = query[: settings.max_query]
    num_special = 3  # [CLS] and two [SEP]
    room = settings.max_length - len(question_ids) - num_special
    if room < 1:
        raise UserError(
            f"max_length {settings.max_length} leaves no room for the passage beside a question of "
            f"{len(question_ids)} tokens; raise max_length or lower max_query"
        )
    num_tokens = len(passage.ids)
    spans = window_spans(num_tokens, room, settings.doc_stride)
    owner_of = _owners(spans, num_tokens)  # the window that owns each token of the passage
    prefix = [special.cls, *question_ids, special.sep]
    windows = []
    for window_number, (start, end) in enumerate(spans):
        window = AnswerWindow(
            question=number,
            ids=[*prefix, *passage.ids[start:end], special.sep],
            offset=len(prefix),
            first=start,
            owned=[owner_of[token] == window_number for token in range(start, end)],
        )
        windows.append(window)
    return windows


def window_spans(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return the range [start, end) of passage tokens in each of the windows that cover a passage.

    With 10 tokens, a room of 6 and a stride of 3, for instance, the windows are [0, 6), [3, 9) and [6, 10). `room`, at
    least 1, is the largest number of passage tokens in a window. `stride`, the distance between the starts of windows,
    is lowered to `room`, so that no token is skipped.
    """
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
    """Return a window's training target: (start position, end position, 1 if the question has no answer, else 0).

    Positions are indices into the window's ids; the answer includes the end. Both are 0, the position of [CLS], if the
    window does not contain the whole answer. `first` and `last` are the numbers of the answer's first and last token
    in the passage; `last` is below `first` for an empty answer. `impossible` means that the question has no answer.
    """
    window_end = window.first + len(window.owned)  # the window has the passage tokens [window.first, window_end)
    if impossible:
        return 0, 0, 1
    contains_answer = window.first <= first <= last < window_end
    if not contains_answer:
        return 0, 0, 0
    shift = window.offset - window.first  # from numbers within the passage to positions in the row
    return first + shift, last + shift, 0


def _owners(spans: Sequence[tuple[int, int]], num_tokens: int) -> list[int]:
    """Return, for each passage token, the number of the window that has the most context around it."""
    # If several overlapping windows scored the same answer, some of them would do so with little context.
    if len(spans) <= 1:
        return [0] * num_tokens
    return [_owner(spans, token) for token in range(num_tokens)]


def _owner(spans: Sequence[tuple[int, int]], token: int) -> int:
    """Return the number of the window in which `token` has the most context, the first of equally good windows."""

    # The context is the number of tokens to the nearer end of the window, plus 0.01 per token of the window, which
    # decides for the longer one of two with equal contexts. Token 5, for instance, has min(5, 0) = 0 tokens of context
    # in the window [0, 6) and min(2, 3) = 2 in the window [3, 9). Source: `max context` of the reference.
    def context(window: int) -> float:
        start, end = spans[window]
        left = token - start
        right = end - 1 - token
        return min(left, right) + 0.01 * (end - start)

    containing = [window for window, (start, end) in enumerate(spans) if start <= token < end]
    return max(containing, key=context)
