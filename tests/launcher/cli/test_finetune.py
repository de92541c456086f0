"""`electra-dist finetune`: results, a table, resuming, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from electra_dist.errors import UserError
from electra_dist.pretrained.load_encoder import Pretrained
from launcher.cli.main import app


def test_the_command_writes_results_and_a_table_and_a_second_call_reuses_them(
    encoder: Pretrained, tmp_path: Path
) -> None:
    config, vocab = tmp_path / "tiny.yaml", tmp_path / "vocab.txt"
    vocab.write_text(encoder.vocabulary.text)
    tower = "{hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 64}"
    config.write_text(
        f"run_dir: {tmp_path}/r\nmodel: {{vocab_size: {encoder.vocabulary.size}, embedding_size: 32, "
        f"max_positions: 64, discriminator: {tower}, generator: {tower}}}\ndata: {{corpus: none, seq_len: 64}}\n"
        f"train: {{num_steps: 1, global_batch: 1, micro_batch: 1}}\n"
    )
    (tmp_path / "RTE").mkdir()
    text = "index\tsentence1\tsentence2\tlabel\n" + "".join(
        f"{i}\tthe dog saw\tthe bird\t{('entailment', 'not_entailment')[i % 2]}\n" for i in range(8)
    )
    for stem in ("train", "dev"):
        (tmp_path / "RTE" / f"{stem}.tsv").write_text(text)
    arguments = ["finetune", "--task", "rte", "--model", f"random:{config}", "--vocab", str(vocab)]
    arguments += ["--data", str(tmp_path), "--seeds", "2", "--set", "epochs=1", "--output", str(tmp_path / "out")]
    first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    # All texts are equal, so all predictions are equal: both seeds count as failed and are named.
    assert report["tasks"][0]["scores"] == [0.5, 0.5]
    assert list(report["tasks"][0]["failed"]) == ["0", "1"]
    assert "failed: rte seed 1: degenerate: all 8 predictions are" in first.output
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert again.output.count("already there") == 2
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "colla"], "--task colla: unknown; choose one of cola, sst2"),
        (["--task", "custom"], "add --text-a COLUMN and --label COLUMN"),
        (["--task", "squad2"], "train-v2.0.json: no such file"),
    ],
)
def test_a_wrong_command_gives_an_error_of_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["finetune", *arguments, "--model", "nowhere", "--data", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception) and "\n" not in str(result.exception)
