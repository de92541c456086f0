"""Train a small ELECTRA on a folder of text.

    python examples/train_on_your_text.py TEXT OUTPUT [--steps 200]

TEXT is a file or folder of .txt, .jsonl and so on (docs/corpus.md). OUTPUT gets vocab.txt, corpus/, train.yaml and
run/. Run the same command again after an interruption: it goes on where it stopped.

The model has 2 layers of width 64, so that a CPU trains it in a minute. For a real one, start from configs/small.yaml
and use `deepspeed launcher/pretrain.py`, which starts one process for each GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CONFIG = """\
run_dir: {output}/run
model:
  vocab_size: {vocab_size}
  embedding_size: 64
  max_positions: 64
  discriminator: {{hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 256}}
  generator: {{hidden_size: 32, num_layers: 2, num_heads: 1, intermediate_size: 128}}
data:
  corpus: {output}/corpus
  seq_len: 64
optimizer:
  lr: 1.0e-3
  warmup_steps: {warmup_steps}
train:
  num_steps: {steps}
  global_batch: 16
  micro_batch: 16
  precision: fp32
checkpoint:
  every_steps: {save_every}
"""


def run(*command: str) -> None:
    """Print a command and run it; an error ends this script with the command's exit code."""
    print("$", " ".join(command), flush=True)
    code = subprocess.run(command).returncode
    if code != 0:
        sys.exit(code)


def main() -> None:
    """Build the vocabulary and the corpus, write the config, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file or folder of text")
    parser.add_argument("output", type=Path, help="folder for everything that is written")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=2000)
    arguments = parser.parse_args()

    vocab = arguments.output / "vocab.txt"
    config = arguments.output / "train.yaml"
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not vocab.exists():
        size = str(arguments.vocab_size)
        run("electra-dist", "corpus", "vocab", "--input", str(arguments.text), "--output", str(vocab), "--size", size)
    config.write_text(
        CONFIG.format(
            output=arguments.output,
            vocab_size=len(vocab.read_text(encoding="utf-8").splitlines()),  # a short text gives fewer than asked for
            steps=arguments.steps,
            warmup_steps=max(1, arguments.steps // 10),
            save_every=max(1, arguments.steps // 4),
        )
    )
    corpus = arguments.output / "corpus"
    source = ("--input", str(arguments.text), "--vocab", str(vocab), "--config", str(config))
    run("electra-dist", "corpus", "build", *source, "--output", str(corpus))
    run(sys.executable, "-m", "electra_launcher.pretrain", "--config", str(config))
    print(f"next: electra-dist score --model {arguments.output}/run TEXTS")


if __name__ == "__main__":
    main()
