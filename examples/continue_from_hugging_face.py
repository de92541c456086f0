"""Go on with the pretraining of a Hugging Face ELECTRA on your own text.

    python examples/continue_from_hugging_face.py MODEL TEXT OUTPUT [--generator MODEL] [--steps 200]

MODEL is the local folder of a discriminator, for example a copy of google/electra-small-discriminator. Its vocabulary
is used for the corpus, and its config.json gives the shape of the towers. Without --generator, the generator starts
with random weights, a quarter as wide as the discriminator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def shape(settings: dict[str, Any], divisor: int = 1) -> dict[str, int]:
    """Return the shape of a tower from a Hugging Face config.json, with all widths divided by `divisor`."""
    return {
        "hidden_size": settings["hidden_size"] // divisor,
        "num_layers": settings["num_hidden_layers"],
        "num_heads": max(1, settings["num_attention_heads"] // divisor),
        "intermediate_size": settings["intermediate_size"] // divisor,
    }


def main() -> None:
    """Write a config whose run starts from the model, build a corpus with its vocabulary, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a Hugging Face ELECTRA discriminator")
    parser.add_argument("text", type=Path, help="file or folder of text")
    parser.add_argument("output", type=Path, help="folder for everything that is written")
    parser.add_argument("--generator", type=Path, help="folder of the generator that belongs to the discriminator")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-len", type=int, default=128)
    arguments = parser.parse_args()

    settings = json.loads((arguments.model / "config.json").read_text())
    generator = shape(settings, divisor=4)
    train: dict[str, Any] = {
        "num_steps": arguments.steps,
        "global_batch": 16,
        "micro_batch": 16,
        "precision": "fp32",
        "init_from": str(arguments.model),
    }
    if arguments.generator:
        generator = shape(json.loads((arguments.generator / "config.json").read_text()))
        train["init_generator_from"] = str(arguments.generator)
    tree = {
        "run_dir": str(arguments.output / "run"),
        "model": {
            "vocab_size": settings["vocab_size"],
            "embedding_size": settings["embedding_size"],
            "max_positions": min(settings["max_position_embeddings"], 512),
            "layer_norm_eps": settings.get("layer_norm_eps", 1e-12),
            "discriminator": shape(settings),
            "generator": generator,
        },
        "data": {"corpus": str(arguments.output / "corpus"), "seq_len": arguments.seq_len},
        "optimizer": {"lr": 1e-4, "warmup_steps": max(1, arguments.steps // 10)},  # lower than for a new model
        "train": train,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    config = arguments.output / "train.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))

    vocab = ("--vocab", str(arguments.model / "vocab.txt"))
    build = ["electra-dist", "corpus", "build", "--input", str(arguments.text), *vocab, "--config", str(config)]
    for command in (
        [*build, "--output", str(arguments.output / "corpus")],
        [sys.executable, "-m", "electra_launcher.pretrain", "--config", str(config)],
    ):
        print("$", " ".join(command), flush=True)
        code = subprocess.run(command).returncode
        if code != 0:
            sys.exit(code)


if __name__ == "__main__":
    main()
