"""The whole way of a user, in a new folder with the installed wheel: from raw text to the answers of a tuned model.

`pytest -s tests/launcher/test_whole_way.py` prints the transcript.
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from support.installed_wheel import Installation
from support.raw_inputs import RAW_FORMATS, write_raw_inputs
from support.real_runs import free_port

GOOD, BAD = ("happy", "kind", "bright", "warm"), ("sad", "cruel", "dark", "cold")
NOUNS = ("boy", "girl", "king", "queen", "dog", "cat", "house", "river", "tree", "road", "book", "song")

CONFIG = """\
extends: configs/defaults.yaml
run_dir: run
model:
  vocab_size: 96
  embedding_size: 32
  max_positions: 32
  discriminator: {hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}
  generator: {hidden_size: 16, num_layers: 1, num_heads: 1, intermediate_size: 32}
data: {corpus: corpus, heldout: corpus/heldout, seq_len: 32}
optimizer: {lr: 1.0e-3, warmup_steps: 5}
train: {num_steps: 40, global_batch: 8, micro_batch: 8, precision: fp32}
checkpoint: {every_steps: 10, keep_best: 1}
log: {every_steps: 10, eval_every_steps: 10, eval_rows: 8, tensorboard: false}
corpus: {heldout_fraction: 0.2, shard_size_mb: 1}
"""


def sentences(number: int, label: str, generator: random.Random) -> list[str]:
    """Return sentences such as "the king is kind and the road is warm ."; the label decides which adjectives occur."""
    adjectives = GOOD if label == "good" else BAD

    def clause() -> str:
        return f"the {generator.choice(NOUNS)} is {generator.choice(adjectives)}"

    return [f"{clause()} and {clause()} ." for _ in range(number)]


def write_task(folder: Path, generator: random.Random) -> None:
    """Write train.tsv and dev.tsv of a task whose label follows from the adjectives of a sentence."""
    folder.mkdir()
    for name, number in (("train.tsv", 200), ("dev.tsv", 20)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(["sentence", "label"])
            for label in ("good", "bad"):
                writer.writerows((text, label) for text in sentences(number, label, generator))


@pytest.mark.sample
def test_from_raw_text_to_the_answers_of_a_pipeline(installed: Installation) -> None:
    folder = installed.cwd / "whole-way"
    folder.mkdir()
    generator = random.Random(1)
    assert len(RAW_FORMATS) >= 12
    texts = [
        "\n".join(sentences(6, generator.choice(("good", "bad")), generator)) for _ in range(20 * len(RAW_FORMATS))
    ]
    write_raw_inputs(folder / "raw", texts)
    (folder / "raw" / "picture.jpg").write_bytes(b"no text")
    (folder / "mine.yaml").write_text(CONFIG)
    write_task(folder / "task", generator)

    def run(*command: str) -> str:
        """Run a command of the installed package in the folder, and print both; return what it printed."""
        done = installed.run(*command, cwd=folder, timeout=300)
        print(f"$ {' '.join(command)}\n{done.stdout}")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("electra-dist", "corpus", "vocab", "--input", "raw", "--output", "vocab.txt", "--size", "96")
    run(
        "electra-dist",
        "corpus",
        "build",
        "--input",
        "raw",
        "--vocab",
        "vocab.txt",
        "--output",
        "corpus",
        "--config",
        "mine.yaml",
    )
    report = json.loads((folder / "corpus" / "build.json").read_text())
    assert sum(kind["files"] for kind in report["files_read"].values()) == len(RAW_FORMATS)
    assert report["inputs_skipped"]["unknown_kind"][".jpg"] == 1
    deepspeed = ("python", "-m", "deepspeed.launcher.runner")  # the script `deepspeed`; only our wheel's are installed
    place = (
        "--num_gpus",
        "1",
        "--master_port",
        str(free_port()),
    )  # another run on this machine may have the default one
    run(*deepspeed, *place, "--module", "electra_launcher.pretrain", "--config", "mine.yaml")
    run("electra-dist", "verify", "run")
    run("electra-dist", "export", "run", "--checkpoint", "best", "--license", "apache-2.0")
    card = (folder / "run" / "export" / "discriminator" / "README.md").read_text()
    assert "license: apache-2.0" in card
    task = ["--task", "custom", "--data", "task", "--text-a", "sentence", "--label", "label"]
    run(
        "electra-dist",
        "finetune",
        "--model",
        "run/export/discriminator",
        *task,
        "--output",
        "tuned",
        "--set",
        "epochs=4",
        "--set",
        "lr=2e-3",
    )
    program = (
        "import json; from transformers import pipeline; ask = pipeline('text-classification', model='tuned/best'); "
        "print(json.dumps(ask(['the cat is warm and the song is kind .', 'the tree is dark and the boy is cruel .'])))"
    )
    answers = json.loads(run("python", "-c", program).splitlines()[-1])
    assert [answer["label"] for answer in answers] == ["good", "bad"]

    (folder / "texts.txt").write_text("the king is happy .\nthe king is king king .\n")
    lines = run("electra-dist", "score", "texts.txt", "--model", "run/export/discriminator", "--json").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["the king is happy .", "the king is king king ."]
