"""`corpus find`: it names exactly the rows and steps whose batches contain a planted sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpus_texts import make_prose, make_vocabulary
from typer.testing import CliRunner

from electra_dist.config import CorpusConfig
from electra_dist.corpus.build_corpus import build_corpus
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.corpus.text_readers import find_inputs
from electra_dist.data.row_order import RowOrder
from electra_dist.data.shard import Shard
from electra_dist.tokenizer import WordPieceTokenizer
from launcher.cli.corpus import app

PLANTED = "quite a rare sentence with zebras"
SEED = 5
WINDOW = 2
GLOBAL_BATCH = 8
NUM_STEPS = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 300 documents, every 50th of which begins with the planted sentence."""
    folder = tmp_path_factory.mktemp("find")
    texts = make_prose(300, 3)
    lines = [f"{PLANTED}\n{text}" if number % 50 == 7 else text for number, text in enumerate(texts)]
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in lines))
    request = BuildRequest(
        inputs=find_inputs([folder / "in.jsonl"]),
        vocabulary=make_vocabulary(),
        output=str(folder / "corpus"),
        seq_len=64,
        seed=3,
        corpus=CorpusConfig(shard_size_mb=0.02),
    )
    build_corpus(request)
    return folder / "corpus"


def rows_of(corpus: Path) -> list[np.ndarray]:
    """Return the rows of each shard."""
    manifest = json.loads((corpus / "corpus.json").read_text())
    shards = [Shard(corpus / entry["name"], 64, np.dtype(manifest["dtype"])) for entry in manifest["shards"]]
    return [shard.rows(np.arange(shard.num_rows)) for shard in shards]


def contains(row: np.ndarray, tokens: list[int]) -> bool:
    """Return whether a row contains the tokens one after another; special tokens are passed over."""
    special = make_vocabulary().special
    added = [str(special[token]) for token in ("[CLS]", "[SEP]", "[PAD]")]
    kept = [str(token) for token in row.tolist() if str(token) not in added]
    return f" {' '.join(map(str, tokens))} " in f" {' '.join(kept)} "


def find(*arguments: str) -> dict[str, Any]:
    """Return what `corpus find ... --json` prints."""
    result = CliRunner().invoke(app, ["find", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_rows_that_are_named_contain_the_sentence_and_no_other_row_does(corpus: Path) -> None:
    [tokens] = WordPieceTokenizer(make_vocabulary(), lowercase=True).encode([PLANTED])
    least = len(tokens)

    found = find(PLANTED, "--corpus", str(corpus), "--least", str(least))

    names = [entry["name"] for entry in json.loads((corpus / "corpus.json").read_text())["shards"]]
    expected = {
        (names[shard], row)
        for shard, rows in enumerate(rows_of(corpus))
        for row in range(len(rows))
        if contains(rows[row], tokens)
    }
    assert {(row["shard"], row["row"]) for row in found["rows"]} == expected
    assert len(expected) >= 4  # of six; a sentence may be divided between rows
    assert all(row["tokens"] == least == found["tokens"] for row in found["rows"])


def test_the_steps_that_are_named_read_the_sentence_and_no_other_step_does(corpus: Path, tmp_path: Path) -> None:
    """The independent truth is the batches of all steps. Step 3 is skipped, and the run has done 20 steps."""
    [tokens] = WordPieceTokenizer(make_vocabulary(), lowercase=True).encode([PLANTED])
    run = tmp_path / "run"
    run.mkdir()
    config = {
        "run_dir": str(run),
        "seed": SEED,
        "model": {
            "vocab_size": make_vocabulary().size,
            "max_positions": 64,
            "discriminator": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8},
            "generator": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8},
        },
        "data": {"corpus": str(corpus), "seq_len": 64, "shuffle_window_shards": WINDOW},
        "train": {"num_steps": NUM_STEPS, "global_batch": GLOBAL_BATCH, "micro_batch": 1, "skip_steps": [3]},
    }
    (run / "config.yaml").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 20}) + "\n")

    found = find(PLANTED, "--run", str(run), "--least", str(len(tokens)))

    rows = rows_of(corpus)
    order = RowOrder([len(shard) for shard in rows], SEED, WINDOW)
    expected = set()
    for step in range(NUM_STEPS):
        _, shards, row_numbers = order.locate(np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        if any(contains(rows[shard][row], tokens) for shard, row in zip(shards, row_numbers)):
            expected.add(step)
    uses = [use for row in found["rows"] for use in row["uses"]]
    assert {use["step"] for use in uses} == expected
    assert all(use["is_skipped"] == (use["step"] == 3) for use in uses)
    assert all(use["is_done"] == (use["step"] < 20) for use in uses)


def test_a_text_that_is_in_no_row_is_reported(corpus: Path) -> None:
    result = CliRunner().invoke(app, ["find", "zebras were never here before", "--corpus", str(corpus)])
    assert result.exit_code == 0
    assert "contains the text" in result.output
