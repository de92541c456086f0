"""`electra-dist score`: lines, JSON and re-ranking, from a file and from standard input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from electra_launcher.cli.main import app
from electra_launcher.cli.models import TextLine, ranks, read_text_lines
from typer.testing import CliRunner

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.scoring.text_scores import TextScorer
from electra_dist.tokenizer import Vocabulary

INPUT = "the boy is tired\nthe boy are tired\n\nthese dogs\nthese dog saw\nthis dog\n"
TEXTS = [line for line in INPUT.split("\n") if line]


@pytest.fixture
def model_folder(encoder: Pretrained, model: ModelConfig, tmp_path: Path) -> str:
    """The encoder as a Hugging Face folder."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(encoder.vocabulary.text)
    state = build_towers(model, 3).state_dict()  # the weights of `encoder`
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "model")
    return str(tmp_path / "model")


def score(*arguments: str, text: str = INPUT) -> list[str]:
    """Return the lines that the command prints for a text on standard input."""
    result = CliRunner().invoke(app, ["score", *arguments], input=text, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.split("\n")[:-1]


def test_each_text_is_printed_with_its_score(encoder: Pretrained, model_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(INPUT)
    expected = [f"{text.score:.4f}\t{text.text}" for text in TextScorer(encoder, torch.device("cpu")).score(TEXTS)]

    assert score(str(file), "--model", model_folder) == expected
    assert score("--model", model_folder) == expected
    assert score("-", "--model", model_folder) == expected
    with_tokens = score("--model", model_folder, "--tokens")
    assert with_tokens[0::2] == expected
    values = [part.split(":") for part in with_tokens[1].split()]
    assert [token for token, _ in values] == ["the", "boy", "is", "tired"]
    assert all(0.0 < float(value) < 1.0 for _, value in values)


def test_what_a_score_means_is_said_beside_the_scores_and_not_in_json(model_folder: str) -> None:
    scored = CliRunner().invoke(app, ["score", "--model", model_folder], input=INPUT)
    in_json = CliRunner().invoke(app, ["score", "--model", model_folder, "--json"], input=INPUT)

    assert "higher is more plausible; a longer text has a lower score" in scored.stderr
    assert len(scored.stdout.splitlines()) == len(TEXTS)
    assert "plausible" not in in_json.output


def test_json_has_an_object_for_each_text_with_all_values(encoder: Pretrained, model_folder: str) -> None:
    records = [json.loads(line) for line in score("--model", model_folder, "--json")]

    assert [record["line"] for record in records] == [1, 2, 4, 5, 6]
    expected = TextScorer(encoder, torch.device("cpu")).score(TEXTS)
    for record, text_score in zip(records, expected, strict=True):
        assert record["text"] == text_score.text
        assert record["score"] == pytest.approx(sum(record["log_probs"]), abs=1e-9)
        assert record["tokens"] == text_score.tokens
        assert record["replaced_probability"] == pytest.approx(text_score.replaced_probability, abs=1e-6)


def test_re_ranking_sorts_the_candidates_of_each_group(model_folder: str) -> None:
    score_of = {
        record["text"]: record["score"] for record in map(json.loads, score("--model", model_folder, "--json"))
    }
    first = sorted(TEXTS[:2], key=lambda text: -score_of[text])
    second = sorted(TEXTS[2:], key=lambda text: -score_of[text])

    lines = score("--model", model_folder, "--rerank")
    assert [line.partition("\t")[2] for line in lines] == [*first, "", *second]
    records = [json.loads(line) for line in score("--model", model_folder, "--rerank", "--json")]
    assert [(record["group"], record["rank"], record["text"]) for record in records] == [
        *((1, rank, text) for rank, text in enumerate(first, start=1)),
        *((2, rank, text) for rank, text in enumerate(second, start=1)),
    ]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["nowhere.txt"], "", "nowhere.txt: no such file; give a file with one text on each line"),
        ([], "\n\n", "standard input: no text; write one text on each line"),
        ([], b"a\n\xff", "standard input:2: not UTF-8; convert the file to UTF-8"),
        ([], "a", "nomodel: not a model"),
    ],
)
def test_a_wrong_command_gives_an_error_of_one_line(arguments: list[str], text: str | bytes, message: str) -> None:
    result = CliRunner().invoke(app, ["score", *arguments, "--model", "nomodel"], input=text)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("command", [["score", "-", "--model"], ["minimal-pairs", "--pairs", "4", "--model"]])
def test_progress_is_a_line_on_stderr_where_no_terminal_shows_a_bar(
    command: list[str], model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = CliRunner().invoke(app, [*command, model_folder], input=INPUT, catch_exceptions=False)
    monkeypatch.setattr("electra_launcher.cli.command_output._LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr("electra_launcher.cli.command_output._MOST_PAUSE_S", 0.0)
    long = CliRunner().invoke(app, [*command, model_folder], input=INPUT, catch_exceptions=False)
    assert " of " not in quick.stderr and long.stdout == quick.stdout
    assert re.search(r"^(score|predict): \d+ of \d+", long.stderr, re.MULTILINE), long.stderr


def test_lines_are_texts_and_blank_lines_end_groups() -> None:
    data = "\ufeffa b\r\nc\n\n \n d \ne".encode()
    assert read_text_lines(data, "f") == [
        TextLine(line=1, group=1, text="a b"),
        TextLine(line=2, group=1, text="c"),
        TextLine(line=5, group=2, text="d"),
        TextLine(line=6, group=2, text="e"),
    ]
    with pytest.raises(UserError, match="f:2: not UTF-8"):
        read_text_lines(b"a\n\xff\n", "f")
    with pytest.raises(UserError, match="f: no text"):
        read_text_lines(b"\n \n", "f")


def test_re_ranking_sorts_each_group_by_score_and_keeps_the_order_of_ties() -> None:
    lines = [TextLine(line=number, group=group, text="") for number, group in enumerate([1, 1, 1, 2, 2])]
    assert ranks(lines, [-3.0, -1.0, -3.0, -9.0, -8.0]) == [(1, 1), (0, 2), (2, 3), (4, 1), (3, 2)]
