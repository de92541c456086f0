"""What tests of real runs share: a synthetic corpus, the command a user types, how to kill a rank."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.store import open_store

REPOSITORY = Path(__file__).resolve().parent.parent
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
VOCAB_SIZE = 300  # not a multiple of 128: the padded table is exercised
SEQ_LEN = 32


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


def kill_a_rank_at(config: Path, run_dir: Path, ranks: int, step: int, victim: int) -> int:
    """Start a run and kill -9 one rank once `step` is in metrics.jsonl; returns the launcher's exit code."""
    process = subprocess.Popen(
        deepspeed_command(config, ranks), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run makes no progress"
            time.sleep(0.01)
        os.kill(rank_pid(process.pid, victim), signal.SIGKILL)
        return process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def rank_pid(session: int, rank: int) -> int:
    """The process of `rank` within the session that a command was started in."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            environment = (stat.parent / "environ").read_bytes().split(b"\0")
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[3]) == session and f"RANK={rank}".encode() in environment and b"--local_rank" in command:
            return int(stat.parent.name)
    raise AssertionError(f"no process of rank {rank} in session {session}")
