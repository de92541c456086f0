"""Helpers of tests and drills that start real runs: a synthetic corpus, a tiny config, commands, kills."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.store.open_store import open_store

_PORTS = range(10_000, 20_000)
REPOSITORY = Path(__file__).resolve().parents[2]
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
VOCAB_SIZE = 300  # not a multiple of 128: the padded table is exercised
SEQ_LEN = 32
LOSSES = ("step", "loss", "mlm_loss", "rtd_loss", "grad_norm", "replaced_accuracy", "original_accuracy")


def synthetic_rows(num_rows: int, seed: int, seq_len: int = SEQ_LEN, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """Return uint16 rows, [num_rows, seq_len]: one or more examples a row, some padding, predictable next tokens."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((num_rows, seq_len), np.uint16)
    for row in rows:
        at = 0
        while seq_len - at >= 8:
            length = int(rng.integers(8, min(24, seq_len - at) + 1))
            words = (np.arange(length - 3) * 7 + rng.integers(5, vocab_size)) % (vocab_size - 5) + 5
            cut = int(rng.integers(1, length - 3))
            row[at : at + length] = [2, *words[:cut], 3, *words[cut:], 3]
            at += length
    return rows


def write_corpus(
    url: str,
    rows_per_shard: list[int],
    seed: int = 0,
    endpoint_url: str | None = None,
    seq_len: int = SEQ_LEN,
    vocab_size: int = VOCAB_SIZE,
) -> CorpusManifest:
    """Write a corpus of synthetic rows to `url` and return its manifest; equal arguments give an equal fingerprint."""
    store = open_store(url, endpoint_url)
    shards = []
    vocab = "\n".join([*SPECIAL, *(f"w{i}" for i in range(vocab_size - len(SPECIAL)))]).encode() + b"\n"
    store.write("vocab.txt", vocab)
    for number, num_rows in enumerate(rows_per_shard):
        rows = synthetic_rows(num_rows, seed * 1000 + number, seq_len, vocab_size)
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
        seq_len=seq_len,
        dtype="uint16",
        tokenizer=TokenizerEntry(
            sha256=hashlib.sha256(vocab).hexdigest(), vocab_size=vocab_size, lowercase=True, special=SPECIAL
        ),
        shards=tuple(shards),
    )
    write_manifest(store, manifest)
    return manifest


def tiny_tree(run_dir: Path, corpus: str, **settings: object) -> dict[str, Any]:
    """Return the config of a run of 20 steps of 16 rows with towers of two layers, as a tree.

    `settings` maps dotted keys to values that replace the defaults, for example `train.num_steps`.
    """
    tree: dict[str, Any] = {
        "run_dir": str(run_dir),
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
            "corpus": corpus,
            "heldout": f"{corpus}/heldout",
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
    if not {"optimizer", "optimizer.warmup_steps"} & set(settings):  # a warm-up is not longer than its run
        tree["optimizer"]["warmup_steps"] = min(tree["optimizer"]["warmup_steps"], tree["train"]["num_steps"])
    return tree


def write_tiny_config(file: Path, run_dir: Path, corpus: str, **settings: object) -> Path:
    """Write the config of `tiny_tree` as YAML to `file` and return `file`."""
    file.write_text(yaml.safe_dump(tiny_tree(run_dir, corpus, **settings)))
    return file


def step_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step records of metrics.jsonl so far, without a last line that is still being written."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    records = [json.loads(line) for line in text.split("\n")[:-1]]
    return [record for record in records if "grad_norm" in record]


def read_losses(run_dir: Path) -> list[tuple]:
    """Return the fields LOSSES of every step record, which an equal run must reproduce bit for bit."""
    return [tuple(record[name] for name in LOSSES) for record in step_records(run_dir)]


def go_back(run_dir: Path, step: int) -> None:
    """Delete the checkpoints after `step`, so that the next start of the run continues from that step."""
    for folder in (run_dir / "checkpoints").glob("step-*"):
        _, checkpoint_step, _ = folder.name.split("-")  # of "step-00000004-a0001"
        if int(checkpoint_step) > step:
            shutil.rmtree(folder)


def free_port() -> int:
    """Return a random TCP port that was free a moment ago.

    It is below the ports that the kernel gives to connections, any of which might otherwise take it before its user
    does.
    """
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def deepspeed_command(config: Path, ranks: int, *overrides: str) -> list[str]:
    """Return the `deepspeed` command that a user types to start a run, with an unused port."""
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    command = [deepspeed, "--num_gpus", str(ranks), "--master_port", str(free_port())]
    command += [str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    return command


def quick_command(config: Path, ranks: int, *overrides: str) -> list[str]:
    """Return a faster equivalent of `deepspeed_command`.

    It leaves out the wrappers that import DeepSpeed only to start the next program.
    """
    *_, script, option, file = deepspeed_command(config, ranks)
    arguments = [script, option, file, *(part for override in overrides for part in ("--set", override))]
    if ranks == 1:
        return [sys.executable, *arguments]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    launch = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    return [*launch, "--master_addr=127.0.0.1", f"--master_port={free_port()}", *arguments]


@contextlib.contextmanager
def started(
    config: Path, ranks: int, log: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run in its own session, and kill every process of that session at the end of the block.
    Its stdout and stderr are appended to the file `log`, and otherwise discarded. `env` is added to its environment.
    """
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("ab")) if log else subprocess.DEVNULL
        process = subprocess.Popen(
            deepspeed_command(config, ranks),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        try:
            yield process
        except AssertionError as error:
            if log:
                error.add_note(log.read_text(errors="replace")[-6000:])
            raise
        finally:
            kill_session(process.pid)
            process.wait()


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float = 300, poll_s: float = 0.01
) -> None:
    """Wait until `condition` holds; fail if the process ends first or `timeout_s` seconds pass."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(poll_s)


class Kill(NamedTuple):
    """Moment and victim of a kill -9."""

    step: int  # kill once this many steps are recorded
    victim: int | None  # rank; None: every process of the run
    during_save: bool = False  # wait after `step` until a checkpoint is being written
    delay_s: float = 0.0  # with `during_save`: seconds from the start of the save to the kill


class Killed(NamedTuple):
    """Outcome of a killed run."""

    code: int  # exit code of the command
    cut_a_save: bool  # whether a checkpoint that was begun remained uncommitted


def run_until_killed(config: Path, run_dir: Path, ranks: int, kill: Kill) -> Killed:
    """Start a run, kill its victims with SIGKILL at the moment that `kill` describes, and wait for its end."""
    num_earlier_starts = len(_starts(run_dir))

    def is_due() -> bool:
        new_starts = _starts(run_dir)[num_earlier_starts:]
        if not new_starts:  # the records so far are those of an earlier start, which may have reached kill.step
            return False
        return len(step_records(run_dir)) >= max(kill.step, new_starts[0]["step"] + 1)

    with started(config, ranks, run_dir.with_suffix(".log")) as process:
        wait_until(is_due, process)
        victims = session_pids(process.pid) if kill.victim is None else [rank_pid(process.pid, kill.victim)]
        before = unfinished_saves(run_dir)
        if kill.during_save:
            wait_until(lambda: bool(unfinished_saves(run_dir) - before), process, poll_s=0.0005)
            time.sleep(kill.delay_s)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Killed(process.wait(timeout=180), bool(unfinished_saves(run_dir) - before))


def _starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the `start` and `resume` events of a run's ledger."""
    ledger = run_dir / "ledger.jsonl"
    lines = ledger.read_text().split("\n")[:-1] if ledger.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] in ("start", "resume")]


def unfinished_saves(run_dir: Path) -> set[str]:
    """Return the names of the checkpoint folders that are not committed."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return {path.name for path in folders if not (path / "manifest.json").exists()}


def rank_pid(session: int, rank: int) -> int:
    """Return the process id of `rank` in the session of a started command."""
    for pid in session_pids(session):
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{pid}")
            environment = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and b"--local_rank" in (process / "cmdline").read_bytes():
                return pid
    raise AssertionError(f"no process of rank {rank} in session {session}")


def session_pids(session: int) -> list[int]:
    """Return the ids of all processes of a session; a session has the id of its first process."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                pids.append(int(stat.parent.name))
    return pids


def kill_session(session: int) -> None:
    """Send SIGKILL to every process that a command has started, as if the node lost power."""
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
