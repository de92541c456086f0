"""`electra-dist finetune`: results, a table, resuming, and errors of one line."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from electra_dist.errors import UserError
from electra_dist.finetune import run_seeds
from electra_dist.pretrained.encoder import Pretrained


@pytest.fixture
def model_arguments(encoder: Pretrained, tmp_path: Path) -> list[str]:
    """Options that name a tiny model with random weights and its vocabulary."""
    config, vocab = tmp_path / "tiny.yaml", tmp_path / "vocab.txt"
    vocab.write_text(encoder.vocabulary.text)
    tower = "{hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 64}"
    config.write_text(
        f"run_dir: {tmp_path}/r\nmodel: {{vocab_size: {encoder.vocabulary.size}, embedding_size: 32, "
        f"max_positions: 64, discriminator: {tower}, generator: {tower}}}\ndata: {{corpus: none, seq_len: 64}}\n"
        f"train: {{num_steps: 1, global_batch: 1, micro_batch: 1}}\n"
    )
    return ["--model", f"random:{config}", "--vocab", str(vocab)]


def write_rte(folder: Path) -> None:
    (folder / "RTE").mkdir()
    text = "index\tsentence1\tsentence2\tlabel\n" + "".join(
        f"{i}\tthe dog saw\tthe bird\t{('entailment', 'not_entailment')[i % 2]}\n" for i in range(8)
    )
    for stem in ("train", "dev", "test"):
        (folder / "RTE" / f"{stem}.tsv").write_text(text)


def test_a_second_command_with_the_same_output_is_refused_while_the_first_one_runs(
    model_arguments: list[str], tmp_path: Path
) -> None:
    write_rte(tmp_path)
    arguments = ["finetune", "--task", "rte", *model_arguments, "--data", str(tmp_path), "--set", "epochs=1"]
    arguments += ["--output", str(tmp_path / "out")]

    with run_seeds.only_command(tmp_path / "out"):
        second = CliRunner().invoke(app, arguments)

    assert isinstance(second.exception, UserError)
    assert str(second.exception) == (
        f"{tmp_path}/out: another fine-tuning writes to this folder; wait for its end, or pass another --output"
    )
    assert list((tmp_path / "out").iterdir()) == []
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_the_command_writes_results_and_a_table_and_a_second_call_reuses_them(
    model_arguments: list[str], tmp_path: Path
) -> None:
    write_rte(tmp_path)
    arguments = ["finetune", "--task", "rte", *model_arguments]
    arguments += ["--data", str(tmp_path), "--seeds", "2", "--set", "epochs=1", "--output", str(tmp_path / "out")]
    first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    # All texts are equal, so all predictions are equal: both seeds count as failed and are named.
    assert report["tasks"][0]["scores"] == [0.5, 0.5]
    assert list(report["tasks"][0]["failed"]) == ["0", "1"]
    few = "rte: steps of 32 examples, for each seed: 1, which is few: --set epochs=10 may help"
    assert 0 <= first.output.index("loading random:") < first.output.index(few) < first.output.index("rte seed 0")
    assert "f1 of not_entailment" in first.output
    assert "failed: rte seed 1: degenerate: all 8 predictions are" in first.output
    assert "to compare: rte: always to predict `entailment` has accuracy 0.5000" in first.output
    assert "electra-dist predict" not in first.output
    assert "next:\n  rte has learnt nothing: repeat the command with --set epochs=10 and another" in first.output
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert again.output.count("already there") == 2
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report

    # The model for others: best in Hugging Face's format, with predictions for the benchmark.
    best = tmp_path / "out" / "best"
    loaded = AutoModelForSequenceClassification.from_pretrained(best)
    assert loaded.config.id2label == {0: "entailment", 1: "not_entailment"}
    assert (best / "submission" / "RTE.tsv").read_text().startswith("index\tprediction\n0\t")
    longer = ["finetune", "--task", "rte", *model_arguments, "--data", str(tmp_path), "--set", "epochs=10"]
    many = CliRunner().invoke(app, [*longer, "--output", str(tmp_path / "b")], catch_exceptions=False)
    assert "--set epochs" not in many.output and "rte has learnt nothing: add examples" in many.output
    refused = CliRunner().invoke(app, [*arguments, "--set", "lr=1e-3"])
    assert isinstance(refused.exception, UserError)
    assert "repeat the command with --set lr=" in str(refused.exception)
    assert "pass another --output" in str(refused.exception)


def test_after_seeds_that_all_diverged_the_next_step_is_a_lower_learning_rate(
    model_arguments: list[str], tmp_path: Path
) -> None:
    write_rte(tmp_path)
    arguments = ["finetune", "--task", "rte", *model_arguments, "--data", str(tmp_path)]
    arguments += ["--output", str(tmp_path / "out"), "--set", "lr=1e30", "--set", "epochs=20"]

    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert "failed: rte seed 0: diverged: " in result.output
    assert "next:\n  rte has diverged: repeat the command with --set lr=1e+29, or with an earlier" in result.output
    assert "learnt nothing" not in result.output


def test_several_tasks_have_a_folder_each_and_no_save_writes_scores_only(
    model_arguments: list[str], tmp_path: Path
) -> None:
    write_rte(tmp_path)
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.txt").write_text("the O\nking B-PER\nsaw O\n\nthe O\nhouse O\n")
    arguments = ["finetune", "--task", "rte,ner", *model_arguments, "--data", str(tmp_path), "--set", "epochs=1"]

    saved = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "a")], catch_exceptions=False)
    scores = CliRunner().invoke(
        app, [*arguments, "--output", str(tmp_path / "b"), "--no-save"], catch_exceptions=False
    )

    assert saved.exit_code == scores.exit_code == 0
    for task in ("rte", "ner"):
        assert (tmp_path / "a" / task / "best" / "model.safetensors").exists()
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"results.jsonl", "results.json"}
    assert f"predict {tmp_path / 'a' / 'ner'} WORDS.txt" in saved.output
    assert "electra-dist predict" not in scores.output
    both = [json.loads((tmp_path / name / "results.json").read_text())["tasks"] for name in ("a", "b")]
    assert [task["scores"] for task in both[0]] == [task["scores"] for task in both[1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "colla"], "colla: none of the tasks cola, sst2"),
        (["--task", "custom"], "no table for training; name a .tsv, .csv, .jsonl, .parquet file with --data"),
        (["--task", "mine"], "(--text-a COLUMN and --label COLUMN, in a comparison"),
        (["--task", "rte", "--set", "learning_rate=1"], "unknown key `learning_rate`"),
        (["--task", "rte", "--checkpoint", "best"], "RTE/train.tsv: no such file"),
        (["--task", "squad2"], "train-v2.0.json: no such file"),
        (["--task", "ner"], "no train file; put train.conllu, or train.txt"),
        (["--task", "rte", "--probe", "--parallel", "2"], "--parallel: a probe has no seeds"),
    ],
)
def test_a_wrong_command_gives_an_error_of_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["finetune", *arguments, "--model", "nowhere", "--data", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_ctrl_c_says_how_to_go_on_and_what_is_kept(
    model_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_seeds, "run_all", interrupted)
    (tmp_path / "train.csv").write_text("text,label\n" + "a b,x\nb a,y\n" * 20)

    result = CliRunner().invoke(app, ["finetune", *model_arguments, "--data", str(tmp_path / "train.csv")])

    assert result.exit_code == 75
    assert "interrupted; run the same command again to go on; seeds whose result was printed are kept" in result.stderr


def test_a_file_of_base64_is_named_before_training_and_before_prediction(
    model_arguments: list[str], tmp_path: Path
) -> None:
    codes = [base64.b64encode(hashlib.sha256(bytes([number])).digest()).decode() for number in range(40)]
    rows = [f"{code},{('good', 'bad')[number % 2]}" for number, code in enumerate(codes)]
    (tmp_path / "own.csv").write_text("text,label\n" + "\n".join(rows))
    arguments = ["finetune", "--data", str(tmp_path / "own.csv"), *model_arguments, "--output", str(tmp_path / "out")]
    tuned = CliRunner().invoke(
        app, [*arguments, "--set", "epochs=1", "--set", "max_unk_rate=1"], catch_exceptions=False
    )
    remark = f"{tmp_path}/own.csv looks like no text: its words have 44 characters on average, as in base64"
    assert remark in tuned.stdout, tuned.output
    command = ["predict", str(tmp_path / "out"), str(tmp_path / "own.csv")]
    predicted = CliRunner().invoke(app, command, catch_exceptions=False)
    assert remark in predicted.stderr and remark not in predicted.stdout
    assert "\nf1 of good " in predicted.stderr


@pytest.mark.parametrize("parallel", ["1", pytest.param("2", marks=pytest.mark.multiproc)])
def test_progress_is_a_line_on_stderr_where_no_terminal_shows_a_bar(
    model_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    monkeypatch.setattr("electra_launcher.cli.command_output._LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr("electra_launcher.cli.command_output._MOST_PAUSE_S", 0.0)
    write_rte(tmp_path)
    arguments = ["finetune", "--task", "rte", *model_arguments, "--data", str(tmp_path), "--seeds", "2"]
    arguments += ["--set", "epochs=8", "--output", str(tmp_path / "out"), "--parallel", parallel]
    tuned = CliRunner().invoke(app, arguments, catch_exceptions=False)
    what = "steps of 32: 2 of 2" if parallel == "1" else "seeds: 2 of 2"
    assert what in tuned.stderr and what not in tuned.stdout
    (tmp_path / "new.csv").write_text("sentence1,sentence2\nthe dog saw,the bird\n")
    command = ["predict", str(tmp_path / "out" / "best"), str(tmp_path / "new.csv")]
    predicted = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "predict: 1 of 1" in predicted.stderr and "predict: 1" not in predicted.stdout
