"""Fixtures for tests that start real runs: a tiny corpus, a tiny config, `deepspeed` as a user would type it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.store import open_store

REPOSITORY = Path(__file__).resolve().parent.parent
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
VOCAB_SIZE = 300  # not a multiple of 128: the padded table is exercised
SEQ_LEN = 32

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def synthetic_rows(num_rows: int, seed: int) -> np.ndarray:
    """[num_rows, SEQ_LEN] uint16: one or two examples a row, some padding, each token predicting the next."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((num_rows, SEQ_LEN), np.uint16)
    for row in rows:
        at = 0
        while SEQ_LEN - at >= 8:
            length = int(rng.integers(8, min(24, SEQ_LEN - at) + 1))
            words = (np.arange(length - 3) * 7 + rng.integers(5, VOCAB_SIZE)) % (VOCAB_SIZE - 5) + 5
            cut = int(rng.integers(1, length - 3))
            row[at : at + length] = [2, *words[:cut], 3, *words[cut:], 3]
            at += length
    return rows


def write_corpus(
    url: str, rows_per_shard: list[int], seed: int = 0, endpoint_url: str | None = None
) -> CorpusManifest:
    """A corpus of synthetic rows at `url`; equal arguments give an equal fingerprint."""
    store = open_store(url, endpoint_url)
    shards = []
    vocab = "\n".join([*SPECIAL, *(f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL)))]).encode() + b"\n"
    store.write("vocab.txt", vocab)
    for number, num_rows in enumerate(rows_per_shard):
        rows = synthetic_rows(num_rows, seed * 1000 + number)
        file = io.BytesIO()
        write_shard(file, rows, block_rows=16)
        data = file.getvalue()
        name = f"shard-{number:06d}.tar"
        store.write(name, data)
        shards.append(
            ShardEntry(
                name=name,
                rows=num_rows,
                tokens=int((rows != 0).sum()),
                bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    manifest = CorpusManifest(
        seq_len=SEQ_LEN,
        dtype="uint16",
        tokenizer=TokenizerEntry(
            sha256=hashlib.sha256(vocab).hexdigest(), vocab_size=VOCAB_SIZE, lowercase=True, special=SPECIAL
        ),
        shards=tuple(shards),
    )
    write_manifest(store, manifest)
    return manifest


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


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def deepspeed_command(config: Path, ranks: int, *overrides: str) -> list[str]:
    """What a user types, with a port of its own."""
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    command = [deepspeed, "--num_gpus", str(ranks), "--master_port", str(free_port())]
    command += [str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    return command


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
