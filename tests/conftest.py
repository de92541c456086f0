"""Fixtures for tests that start real runs: a tiny corpus, a tiny config, `deepspeed` as a user would type it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from real_runs import SEQ_LEN, VOCAB_SIZE, deepspeed_command, write_corpus

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local corpus of 5 uneven shards, with a held-out one beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(str(folder), [70, 33, 48, 90, 15])
    write_corpus(str(folder / "heldout"), [24], seed=9)
    return folder


@pytest.fixture
def tiny_config(tiny_corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    """`tiny_config(run_name, **{"train.num_steps": 20})` writes a YAML file of a tiny run and returns its path."""

    def make(run_name: str = "run", **settings: object) -> Path:
        tree: dict = {
            "run_dir": str(tmp_path / run_name),
            "seed": 7,
            "model": {
                "vocab_size": VOCAB_SIZE,
                "embedding_size": 24,
                "max_positions": SEQ_LEN,
                "discriminator": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64},
                "generator": {"hidden_size": 16, "num_layers": 2, "num_heads": 1, "intermediate_size": 32},
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "data": {
                "corpus": str(tiny_corpus),
                "heldout": str(tiny_corpus / "heldout"),
                "seq_len": SEQ_LEN,
                "shuffle_window_shards": 2,
            },
            "optimizer": {"lr": 1e-3, "warmup_steps": 10},
            "train": {"num_steps": 20, "global_batch": 16, "micro_batch": 8, "precision": "fp32"},
            "checkpoint": {"every_steps": 5},
            "log": {"every_steps": 1, "eval_rows": 20, "tensorboard": False},
        }
        for key, value in settings.items():
            node = tree
            *path, last = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        file = tmp_path / f"{run_name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    return make


@pytest.fixture
def pretrain() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`pretrain(config, ranks, *overrides)` runs to the end and returns the finished process."""

    def run(
        config: Path, ranks: int, *overrides: str, check: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            deepspeed_command(config, ranks, *overrides),
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **(env or {})},
        )
        assert not check or done.returncode == 0, (
            f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        )
        return done

    return run


LOSSES = ("step", "loss", "mlm_loss", "rtd_loss", "grad_norm", "replaced_accuracy", "original_accuracy")


@pytest.fixture
def losses() -> Callable[[Path], list[tuple]]:
    """`losses(run_dir)`: the numbers of every step record of metrics.jsonl that must repeat bit for bit."""

    def read(run_dir: Path) -> list[tuple]:
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [tuple(r[name] for name in LOSSES) for r in records if "grad_norm" in r]

    return read
