"""Every objective learns on the demo corpus, in a real run: README's first command with other objectives."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.python_docs import write_python_docs

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu_bert.yaml"
WAYS = {
    "rtd": {},
    "mlm": {"name": "mlm"},
    "rtd_masked_only": {"name": "rtd_masked_only"},
    "replace_mlm": {"name": "replace_mlm"},
    "all_tokens_mlm": {"name": "all_tokens_mlm"},
    "electric": {"name": "electric", "temperature": 1},
    "adversarial": {"name": "adversarial"},
    "two-stage": {"generator_only_steps": 30},
    "uniform generator": {"generator": "uniform"},
    "unigram generator": {"generator": "unigram"},
}


@pytest.fixture(scope="module")
def demo_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus that `make corpora/demo/corpus.json` builds."""
    folder = tmp_path_factory.mktemp("demo")
    write_python_docs(folder / "text")
    command = ["build", "--input", folder / "text", "--output", folder / "corpus", "--config", DEMO]
    subprocess.run([Path(sys.executable).with_name("electra-dist"), "corpus", *map(str, command)], check=True)
    return folder / "corpus"


@pytest.mark.drill  # ten real runs
@pytest.mark.parametrize("way", WAYS)
def test_every_objective_learns_on_the_demo_corpus(
    demo_corpus: Path, tmp_path: Path, pretrain: Callable[..., Any], way: str
) -> None:
    """The mean loss of the last five steps is below that of the first five, in each stage."""
    given = {f"objective.{key}": value for key, value in WAYS[way].items()}
    if way == "two-stage":  # the discriminator begins as a copy of the generator
        given["model.generator"] = "{hidden_size: 128, num_layers: 4, num_heads: 4, intermediate_size: 512}"
        given["model.sharing"] = "none"
    given |= {"run_dir": tmp_path / "run", "data.corpus": demo_corpus, "data.heldout": demo_corpus / "heldout"}
    given |= {"train.num_steps": 60, "optimizer.warmup_steps": 5, "log.every_steps": 1, "log.eval_every_steps": 60}
    pretrain(DEMO, 1, *(f"{key}={value}" for key, value in given.items()))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 60
    for stage in (losses[:30], losses[30:]) if way == "two-stage" else (losses,):
        print(f"{way}: {statistics.mean(stage[:5]):.3f} to {statistics.mean(stage[-5:]):.3f}")
        assert statistics.mean(stage[-5:]) < statistics.mean(stage[:5])
    assert [record["kind"] for record in records].count("eval") >= 1
