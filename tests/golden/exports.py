"""Golden exports: the files that `electra-dist export` writes, for each architecture and sharing of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.real_runs import SEQ_LEN, write_corpus, write_tiny_config

from golden.comparison import Kind
from golden.doors import command, files_below, train

SHARINGS = ("embeddings", "all", "none", "gdes")
ARCHITECTURES = ("bert", "modern")
# Records of the moment of the training, and pages and pictures of them.
LEFT_OUT = ("README.md", "pretraining.json", ".png", ".svg", "report.html")


def names() -> list[str]:
    """Return the names of all exports."""
    return [f"{architecture} {sharing}" for architecture in ARCHITECTURES for sharing in SHARINGS]


def make(name: str, folder: Path) -> dict[str, Any]:
    """Train two steps, export the run, and return the digests of the files."""
    architecture, sharing = name.split()
    corpus, run_dir = folder / "corpus", folder / "run"
    write_corpus(str(corpus), [40])
    settings: dict[str, Any] = {
        "train.num_steps": 2,
        "train.global_batch": 4,
        "train.micro_batch": 2,
        "data.heldout": None,
        "model.architecture": architecture,
        "model.sharing": sharing,
    }
    if architecture == "modern":
        settings |= {"model.local_window": SEQ_LEN // 2, "model.embedding_size": 32}
    if sharing == "all":
        tower = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
        settings |= {"model.generator": tower, "model.discriminator": tower}
    config = write_tiny_config(folder / "run.yaml", run_dir, str(corpus), **settings)
    codes, text = train(config, run_dir, 1)
    assert set(codes) == {0}, text[-2000:]
    command(folder, "export", str(run_dir))
    return files_below(run_dir / "export", LEFT_OUT)


KIND = Kind("exports", __doc__.splitlines()[0], names, make, is_of_a_cpu=True)
