"""Tools of the benchmarks: timing in turns, ratios, printed tables, the record of a run, and random corpora.

Guarantee: the ways that a benchmark compares take turns, round after round, so that other load on the machine affects
all of them alike. A ratio is taken within each round; its median and its extremes over the rounds are reported.

A benchmark is a module of this folder with a function `measure(arguments) -> Found`, which `run.py` calls. It may have
`add_options(parser)`, and `ROUNDS`, the default of `--rounds`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.run.environment_record import commit, cpu, versions
from electra_dist.store.interface import Store

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
# Config settings, in the form of `--set`, of a model that trains a step in milliseconds. The smoke runs use them.
TOY = [
    "model.embedding_size=64",
    "model.discriminator={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 256}",
    "model.generator={hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 128}",
]
Json = dict[str, Any]


class ResultLine(NamedTuple):
    """One row of the benchmark table in docs/results.md; its date and command are those of its record."""

    what: str  # Subject and conditions of the measurement.
    value: str  # Our figure with its unit.
    ratio: str  # Comparison with the rivals; empty if there is none.


class Found(NamedTuple):
    """Result of a benchmark."""

    lines: list[ResultLine]
    measured: Json  # The record has these keys, too; JSON values.
    fault: str = ""  # What exceeds a limit that the benchmark guarantees; the program then ends with exit code 1.
    packages: Sequence[str] = ()  # Rivals whose versions the record names.


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run the ways in turn; return the seconds of each round by name: the float that a way returns, or its wall time.

    `warm_up` more rounds run first and are not recorded.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(-warm_up, rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            result = way()
            elapsed = result if isinstance(result, float) else time.perf_counter() - begin
            if round_number >= 0:
                seconds[name].append(elapsed)
    return seconds


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, least and largest of the samples, under the keys median, least and most."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the `summary` of `over` / `under` within each round, which cancels changes of the machine's speed."""
    return summary([numerator / denominator for numerator, denominator in zip(over, under, strict=True)])


def format_summary(found: Mapping[str, float] | Sequence[float], form: str = ".2f") -> str:
    """Format a `summary`, or that of samples, as "median (least to most)", each number by the format `form`."""
    if not isinstance(found, Mapping):
        found = summary(found)
    return f"{found['median']:{form}} ({found['least']:{form}} to {found['most']:{form}})"


def small_config(smoke: bool) -> Config:
    """Return the config of ELECTRA-Small; for the smoke run a toy with short rows and a small vocabulary."""
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"]
    return load_config(REPOSITORY / "configs/small.yaml", toy if smoke else [])


def timed(call: Callable[..., object], *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def run_child(command: Sequence[str], *, cwd: Path = REPOSITORY, **options: Any) -> str:
    """Run a command with options of `subprocess.run`, and return its stdout; end this program if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(
            f"{shlex.join(command)} ended with exit code {done.returncode}; correct what its output reports:\n"
            f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def environment() -> dict[str, str]:
    """Return the environment variables with which a new Python process imports what this one can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def hardware() -> str:
    """Return one line that describes the machine: processor, cores that this process may use, memory in GB."""
    facts = cpu()
    return f"{facts['model']}, {facts['usable_cores']} cores, {facts['memory_gb']} GB"


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the version of each distribution by name; "not installed" where it is missing."""
    version_by_name = dict.fromkeys(packages, "not installed")
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version_by_name[package] = metadata.version(package)
    return version_by_name


def make_record(name: str, command: str, smoke: bool, gpu: str = "") -> Json:
    """Return what the record of every benchmark begins with; its hardware is `gpu`, or else processor and memory."""
    return {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "smoke": smoke,
        "hardware": gpu or hardware(),
        "versions": versions(),
    }


def record_file(record: Json, folder: Path) -> Path:
    """Return the file of a record: FOLDER/NAME-YYYYMMDD.json (UTC)."""
    return folder / f"{record['benchmark']}-{record['date'][:10].replace('-', '')}.json"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as aligned text, the first column to the left and all others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        label = line[0].ljust(widths[0])
        figures = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join([label, *figures]).rstrip(), flush=True)


def write_corpus(
    folder: Path,
    num_shards: int,
    rows_per_shard: int,
    num_distinct: int,
    *,
    seq_len: int = 512,
    vocab_size: int = 30_522,
) -> Store:
    """Write a corpus of random token ids to a folder and return its open store.

    `num_distinct` shards are written, and the others are hard links to them. Each is opened, hashed and mapped like
    any other shard, and the 66 GB of a full corpus need not be written. The first five ids are the special tokens,
    which do not occur.
    """
    # Imported late, because a machine that runs gpu.py may lack the packages that the data need.
    from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, write_manifest
    from electra_dist.data.shard import write_shard
    from electra_dist.store.open_store import open_store

    store = open_store(str(folder))
    rng = np.random.default_rng(0)
    entries: list[ShardEntry] = []
    for number in range(num_shards):
        name = f"shard-{number:06d}.tar"
        if number >= num_distinct:
            original = entries[number % num_distinct]
            os.link(folder / original.name, folder / name)
            entries.append(original.model_copy(update={"name": name}))
            continue
        file = io.BytesIO()
        write_shard(file, rng.integers(5, vocab_size, (rows_per_shard, seq_len), dtype=np.uint16), 1024)
        data = file.getvalue()
        store.write(name, data)
        digest = hashlib.sha256(data).hexdigest()
        tokens = rows_per_shard * seq_len
        entries.append(ShardEntry(name=name, rows=rows_per_shard, tokens=tokens, bytes=len(data), sha256=digest))
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    vocab = "".join(f"{token}\n" for token in [*special, *range(5, vocab_size)]).encode()
    store.write("vocab.txt", vocab)
    digest = hashlib.sha256(vocab).hexdigest()
    tokenizer = TokenizerEntry(sha256=digest, vocab_size=vocab_size, lowercase=True, special=special)
    write_manifest(store, CorpusManifest(seq_len=seq_len, dtype="uint16", tokenizer=tokenizer, shards=tuple(entries)))
    return store
