"""Windows cover every token; spans of tokens are the file's own characters."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.squad.passage_windows import (
    encode_passages,
    make_windows,
    read_squad,
    window_spans,
    window_target,
)
from electra_dist.finetune.squad.squad_task import SquadTask
from electra_dist.pretrained.load_encoder import Pretrained

SETTINGS = FinetuneConfig(max_length=24, max_query=4, doc_stride=6)


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 60))
def test_windows_cover_every_token_and_start_a_stride_apart(num_tokens: int, room: int, stride: int) -> None:
    spans = window_spans(num_tokens, room, stride)
    assert {token for start, end in spans for token in range(start, end)} == set(range(num_tokens))
    assert all(end - start <= room for start, end in spans)
    assert all(b[0] - a[0] == min(stride, room) for a, b in itertools.pairwise(spans))
    assert all(end < num_tokens for _, end in spans[:-1])


def test_each_token_is_owned_by_the_one_window_where_it_has_most_context(encoder: Pretrained) -> None:
    (passage,) = encode_passages(["the boy saw " * 17], encoder.tokenizer)
    windows = make_windows(0, [30, 31], passage, encoder.special, SETTINGS)
    owners: dict[int, list[int]] = {}
    for number, window in enumerate(windows):
        assert window.ids[window.offset :] == [*passage.ids[window.first :][: len(window.owned)], encoder.special.sep]
        for i, owned in enumerate(window.owned):
            if owned:
                owners.setdefault(window.first + i, []).append(number)
    assert {token: len(numbers) for token, numbers in owners.items()} == dict.fromkeys(range(51), 1)
    # Room is 24 - 2 - 3 = 19: windows [0, 19), [6, 25), ... Token 12 has 6 to the right in the first, 6 to the left
    # in the second (the first of equals has it); token 13 has 5 and 7.
    assert (owners[12], owners[13], owners[0]) == ([0], [1], [0])


def test_an_answer_comes_back_as_the_very_characters(encoder: Pretrained) -> None:
    text = "The  K\u00f6nig (King) saw caf\u00e9s,\ncafe\u0301 and \u4e2d\u56fd! He paid $1,234.50."
    (passage,) = encode_passages([text], encoder.tokenizer)
    assert passage.ids == encoder.tokenizer.encode([text])[0]
    for answer in ("K\u00f6nig", "King", "caf\u00e9s,\ncafe\u0301", "cafe\u0301", "\u4e2d", "$1,234.50", "He", text):
        start = text.rindex(answer)
        first, last = passage.tokens(start, start + len(answer))
        assert passage.answer(first, last) == answer


@given(st.text(alphabet="ab \u00e9\u0301\u4e2d,.\n", min_size=1, max_size=60), st.data())
def test_any_span_of_tokens_maps_to_text_and_back(encoder: Pretrained, text: str, data: st.DataObject) -> None:
    (passage,) = encode_passages([text], encoder.tokenizer)
    if not passage.ids:
        return
    first = data.draw(st.integers(0, len(passage.ids) - 1))
    last = data.draw(st.integers(first, len(passage.ids) - 1))
    answer = passage.answer(first, last)
    assert answer in text
    start = passage.offsets[first][0]
    assert text.startswith(answer, start)
    assert passage.tokens(start, start + len(answer)) == (first, last)


def test_targets_point_at_the_answer_and_else_at_cls(encoder: Pretrained) -> None:
    text = "the boy saw the old house near the river the girl saw the ship they knew the old king"
    (passage,) = encode_passages([text], encoder.tokenizer)
    start = text.index("the ship")
    first, last = passage.tokens(start, start + len("the ship"))
    seen = 0
    for window in make_windows(0, [30], passage, encoder.special, SETTINGS.model_copy(update={"max_length": 14})):
        left, right, impossible = window_target(window, first, last, impossible=False)
        assert impossible == 0
        inside = window.first <= first and last < window.first + len(window.owned)
        assert (left > 0) == inside
        if inside:
            seen += 1
            assert window.ids[left : right + 1] == encoder.tokenizer.encode(["the ship"])[0]
        assert window_target(window, 0, -1, impossible=True) == (0, 0, 1)
    assert seen >= 1


def squad_file(path: Path, questions: list[dict], context: str = "The old house is near the river.") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": questions}]}]}))
    return path


def qa(number: int, text: str, start: int, **more: object) -> dict:
    return {"id": f"q{number}", "question": "where?", "answers": [{"text": text, "answer_start": start}], **more}


def test_a_wrong_answer_start_is_mended_and_an_answer_that_is_nowhere_is_left_out(
    tmp_path: Path, encoder: Pretrained
) -> None:
    questions = [qa(0, "the river", 22), qa(1, "the river", 9), qa(2, "the sea", 0)]
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        squad_file(tmp_path / "squad" / name, questions)
    assert [q.start for q in read_squad(tmp_path / "squad" / "dev-v1.1.json", 1).questions] == [22, 22, -1]
    task = SquadTask(1, tmp_path)
    assert "1 questions whose answer is not in the passage" in task.notes[0]
    examples = task.examples(encoder, FinetuneConfig(max_length=64))
    assert len(examples.ids) == 2
    start, end, _ = examples.target_NK[1].tolist()
    assert examples.ids[1][start : end + 1] == encoder.tokenizer.encode(["the river"])[0]


def test_version_2_knows_questions_without_an_answer(tmp_path: Path, encoder: Pretrained) -> None:
    questions = [qa(0, "the river", 22, is_impossible=False), qa(1, "", 0, is_impossible=True, plausible_answers=[])]
    for name in ("dev-v2.0.split-train.json", "dev-v2.0.split-heldout.json"):
        squad_file(tmp_path / name, questions)
    task = SquadTask(2, tmp_path)
    assert [q.answers for q in task.dev.questions] == [("the river",), ()]
    assert task.examples(encoder, FinetuneConfig(max_length=64)).target_NK[1].tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="not a SQuAD 2 file: no key 'is_impossible'"):
        read_squad(squad_file(tmp_path / "v1.json", [qa(0, "river", 26)]), 2)


def test_a_version_2_run_that_had_better_never_answered_is_named(tmp_path: Path, encoder: Pretrained) -> None:
    questions = [qa(0, "the river", 22, is_impossible=False), qa(1, "", 0, is_impossible=True)]
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        squad_file(tmp_path / name, questions)
    task = SquadTask(2, tmp_path)
    passages = encode_passages(task.dev.passages, encoder.tokenizer)
    river = (-1.0, *passages[0].tokens(22, 31))
    good = task.score(passages, {0: river, 1: river}, {0: -1.0, 1: 1.0})
    assert (good.metrics["best_f1"], good.metrics["best_f1_threshold"], good.failure) == (100.0, -1.0, "")
    bad = task.score(passages, {0: river, 1: river}, {0: 1.0, 1: -1.0})
    assert bad.metrics["best_f1"] == 50.0
    assert bad.failure == "degenerate: no threshold beats `no answer` to every question"
