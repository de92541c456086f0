"""Windows cover every token of a passage, and spans of tokens map to the characters of the file and back."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.passage_windows import (
    encode_passages,
    make_windows,
    read_squad,
    window_spans,
    window_target,
)
from electra_dist.finetune.squad_task import Answers, SquadTask, score_answers
from electra_dist.pretrained.encoder import Pretrained

# A row of 24 tokens: [CLS], 2 tokens of the question, [SEP], 19 tokens of the passage, [SEP].
SETTINGS = FinetuneConfig(max_length=24, max_query=4, doc_stride=6)


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 60))
def test_windows_cover_every_token_fit_the_room_and_start_one_stride_apart(
    num_tokens: int, room: int, stride: int
) -> None:
    spans = window_spans(num_tokens, room, stride)

    covered_tokens = {token for start, end in spans for token in range(start, end)}
    assert covered_tokens == set(range(num_tokens))
    for start, end in spans:
        assert end - start <= room
    for (start, _), (next_start, _) in itertools.pairwise(spans):
        assert next_start - start == min(stride, room)
    for _, end in spans[:-1]:
        assert end < num_tokens  # only the last window reaches the end


def test_each_token_is_owned_by_the_one_window_where_it_has_most_context(encoder: Pretrained) -> None:
    num_tokens = 51
    [passage] = encode_passages(["the boy saw " * 17], encoder.tokenizer)

    windows = make_windows(0, [30, 31], passage, encoder.special, SETTINGS)

    owners_of: dict[int, list[int]] = {token: [] for token in range(num_tokens)}
    for window_number, window in enumerate(windows):
        window_end = window.first + len(window.owned)
        passage_part = passage.ids[window.first : window_end]
        assert window.ids[window.offset :] == [*passage_part, encoder.special.sep]
        for index, is_owned in enumerate(window.owned):
            if is_owned:
                owners_of[window.first + index].append(window_number)
    assert len(owners_of) == num_tokens
    for token, owners in owners_of.items():
        assert len(owners) == 1, token
    # The windows are [0, 19), [6, 25), ... Token 12 has 6 tokens to its right in the first window and 6 to its left in
    # the second, so the first of equals owns it. Token 13 has 5 and 7.
    assert owners_of[0] == [0]
    assert owners_of[12] == [0]
    assert owners_of[13] == [1]


def test_an_answer_found_as_tokens_is_given_in_the_exact_characters_of_the_text(encoder: Pretrained) -> None:
    """The text has double spaces, a line break, composed and decomposed accents, Chinese and punctuation."""
    text = "The  K\u00f6nig (King) saw caf\u00e9s,\ncafe\u0301 and \u4e2d\u56fd! He paid $1,234.50."

    [passage] = encode_passages([text], encoder.tokenizer)

    assert passage.ids == encoder.tokenizer.encode([text])[0]
    for answer in ("K\u00f6nig", "King", "caf\u00e9s,\ncafe\u0301", "cafe\u0301", "\u4e2d", "$1,234.50", "He", text):
        start = text.rindex(answer)
        first, last = passage.tokens(start, start + len(answer))
        assert passage.answer(first, last) == answer


@given(st.text(alphabet="ab \u00e9\u0301\u4e2d,.\n", min_size=1, max_size=60), st.data())
def test_any_span_of_tokens_maps_to_a_part_of_the_text_and_back(
    encoder: Pretrained, text: str, data: st.DataObject
) -> None:
    [passage] = encode_passages([text], encoder.tokenizer)
    if not passage.ids:
        return
    last_token = len(passage.ids) - 1
    first = data.draw(st.integers(0, last_token))
    last = data.draw(st.integers(first, last_token))

    answer = passage.answer(first, last)

    assert answer in text
    start, _ = passage.offsets[first]
    assert text.startswith(answer, start)
    assert passage.tokens(start, start + len(answer)) == (first, last)


def test_the_target_is_the_answer_in_windows_that_contain_it_and_cls_in_the_others(encoder: Pretrained) -> None:
    text = "the boy saw the old house near the river the girl saw the ship they knew the old king"
    answer = "the ship"
    answer_ids = encoder.tokenizer.encode([answer])[0]
    [passage] = encode_passages([text], encoder.tokenizer)
    answer_start = text.index(answer)
    first, last = passage.tokens(answer_start, answer_start + len(answer))
    short_rows = SETTINGS.model_copy(update={"max_length": 14})

    num_containing = 0
    for window in make_windows(0, [30], passage, encoder.special, short_rows):
        start, end, impossible = window_target(window, first, last, impossible=False)

        window_end = window.first + len(window.owned)
        contains_answer = window.first <= first and last < window_end
        assert impossible == 0
        assert (start > 0) == contains_answer  # position 0 is [CLS]
        if contains_answer:
            num_containing += 1
            assert window.ids[start : end + 1] == answer_ids
        assert window_target(window, 0, -1, impossible=True) == (0, 0, 1)
    assert num_containing >= 1


CONTEXT = "The old house is near the river."  # "the river" is at 22 to 31


def squad_file(path: Path, questions: list[dict]) -> Path:
    """Write a SQuAD file with one passage, CONTEXT, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paragraph = {"context": CONTEXT, "qas": questions}
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    return path


def question(number: int, answer: str, answer_start: int, **fields: object) -> dict:
    """Return a question of a SQuAD file with one answer and, for version 2, more fields."""
    answers = [{"text": answer, "answer_start": answer_start}]
    return {"id": f"q{number}", "question": "where?", "answers": answers, **fields}


def test_a_wrong_answer_start_is_corrected_and_a_question_without_its_answer_in_the_passage_is_left_out(
    tmp_path: Path, encoder: Pretrained
) -> None:
    questions = [question(0, "the river", 22), question(1, "the river", 9), question(2, "the sea", 0)]
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        squad_file(tmp_path / "squad" / name, questions)

    dev = read_squad(tmp_path / "squad" / "dev-v1.1.json", 1)
    task = SquadTask(1, tmp_path)
    examples = task.examples(encoder, FinetuneConfig(max_length=64))

    assert [entry.start for entry in dev.questions] == [22, 22, -1]
    assert "1 questions whose answer is not in the passage" in task.notes[0]
    assert len(examples.ids) == 2
    start, end, _ = examples.target_NK[1].tolist()
    assert examples.ids[1][start : end + 1] == encoder.tokenizer.encode(["the river"])[0]


def test_version_2_has_questions_without_an_answer_and_refuses_a_file_of_version_1(
    tmp_path: Path, encoder: Pretrained
) -> None:
    questions = [
        question(0, "the river", 22, is_impossible=False),
        question(1, "", 0, is_impossible=True, plausible_answers=[]),
    ]
    for name in ("dev-v2.0.split-train.json", "dev-v2.0.split-heldout.json"):
        squad_file(tmp_path / name, questions)

    task = SquadTask(2, tmp_path)
    examples = task.examples(encoder, FinetuneConfig(max_length=64))

    assert [entry.answers for entry in task.dev.questions] == [("the river",), ()]
    assert examples.target_NK[1].tolist() == [0, 0, 1]  # [CLS], [CLS], impossible
    version_1_file = squad_file(tmp_path / "v1.json", [question(0, "river", 26)])
    with pytest.raises(UserError, match="not a SQuAD 2 file: no key 'is_impossible'"):
        read_squad(version_1_file, 2)


def test_a_version_2_model_that_is_no_better_than_never_answering_counts_as_failed(
    tmp_path: Path, encoder: Pretrained
) -> None:
    """The model gives the right span for both questions; only its no-answer scores can separate them."""
    questions = [question(0, "the river", 22, is_impossible=False), question(1, "", 0, is_impossible=True)]
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        squad_file(tmp_path / name, questions)
    task = SquadTask(2, tmp_path)
    passages = encode_passages(task.dev.passages, encoder.tokenizer)
    first, last = passages[0].tokens(22, 31)
    river_span = (-1.0, first, last)  # log-probability, first and last token
    span_of = {0: river_span, 1: river_span}

    separated = score_answers(2, task.dev, Answers(passages, span_of, no_answer={0: -1.0, 1: 1.0}))
    reversed_order = score_answers(2, task.dev, Answers(passages, span_of, no_answer={0: 1.0, 1: -1.0}))

    assert separated.metrics["best_f1"] == 100.0
    assert separated.metrics["best_f1_threshold"] == -1.0
    assert separated.failures == ()
    assert reversed_order.metrics["best_f1"] == 50.0  # what `no answer` to every question scores
    assert reversed_order.failures == ("degenerate: no threshold beats `no answer` to every question",)
