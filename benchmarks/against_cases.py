"""What `against.py` measures, each case in a new process of one of the two source trees.

    python -P benchmarks/against_cases.py CASE OWN [--smoke]

A case prints seconds by name as JSON. It runs our side of a benchmark of the tree, or commands on the folder of a long
run. OWN is a folder that the case may fill once for all rounds of one tree. The working directory is the root of the
tree. A case that an older commit cannot run, because its benchmarks have other names, ends with the error.

"CPU" is the processor time of the process and of its child processes, with all threads, which other load changes
little.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import REPOSITORY, TOY

ELECTRA_DIST = "import sys; sys.argv[0] = 'electra-dist'; from electra_launcher.cli.main import main; main()"
# Layers of the architecture `modern` with as many parameters as those of ELECTRA-Small's discriminator.
MODERN = [
    "model.architecture=modern",
    "model.embedding_size=256",
    "model.discriminator={hidden_size: 256, num_layers: 12, num_heads: 4, intermediate_size: 680}",
    "model.generator={hidden_size: 256, num_layers: 4, num_heads: 4, intermediate_size: 680}",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
    "data.seq_len=512",
]


@contextmanager
def cpu_time(found: dict[str, float], name: str) -> Iterator[None]:
    """Enter the processor seconds of the block into `found`."""
    begin = _cpu_seconds()
    yield
    found[f"{name}, CPU"] = _cpu_seconds() - begin


def _cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def run(*code: object) -> None:
    """Run Python code with its arguments to the end; end this process with its output if it fails."""
    done = subprocess.run([sys.executable, "-c", *map(str, code)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{code[1:3]} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def loader(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Read three epochs of 49,152 shuffled rows of 512 tokens."""
    import loader as bench

    store = _corpus(bench, own / "corpus", 3, smoke)
    with cpu_time(found, "loader"):
        for _ in range(3):
            for _ in bench.READERS["ours"].read(store, own / "cache"):
                pass


def first_batch(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Give rank 0 of 8 its first batch at 10 % and at 99 % of an epoch of 3,907 shards, from the open store on."""
    import loader as bench

    store = _corpus(bench, own / "corpus", 200 if smoke else bench.SHARDS_OF_33B, smoke)
    with cpu_time(found, "first batch"):
        for epochs in (0.1, 0.99):
            with bench.our_loader(store, own / "cache", bench.GLOBAL_BATCH, bench.NUM_RANKS, epochs) as (rows, _):
                rows.next()


def _corpus(bench: Any, folder: Path, num_shards: int, smoke: bool) -> Any:
    """Return the store of a corpus of random rows, of which at most three shards are different; write it once."""
    from electra_dist.store.open_store import open_store

    if folder.exists():
        return open_store(str(folder))
    return bench.write_corpus(folder, num_shards, 1024 if smoke else bench.ROWS_PER_SHARD, 3)


def head(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Run the generator's head forward and backward on 2,048 masked rows of width 256."""
    import head as bench

    with cpu_time(found, "head"):
        bench.measure_head("ours", *((256, 32) if smoke else (2_048, 256)))


def corpus_build(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Build a corpus of the prose of the Python installation with one worker."""
    import corpus_builder as bench

    config = bench.corpus_config(smoke)
    if not (own / "prepared").exists():
        bench.make_text(Namespace(smoke=smoke, text=None, vocab=None), config, own)
    text, build = bench.Text(own / "prepared", config), bench.installed_ways()["ours"]
    with cpu_time(found, "corpus build"):
        build(text, 1)


def long_runs(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Read a run of 100,000 records: by commands, and by the functions that verify, a model card and a resume use."""
    from support.long_runs import write_long_run

    from electra_dist.report.curves import write_curves_png
    from electra_dist.run.metrics import MetricsWriter

    num_records = 1_000 if smoke else 100_000
    folder = own / "long"
    if not folder.exists():
        write_long_run(folder, num_records)
    with cpu_time(found, "status of 100,000 records"):
        run(ELECTRA_DIST, "status", folder)
    with cpu_time(found, "report of 100,000 records"):
        run(ELECTRA_DIST, "report", folder, "--output", own / "report.html")
    with cpu_time(found, "receipts of 100,000 records"):
        run(f"import pathlib, electra_launcher.cli.verify as v; v.read_marks(pathlib.Path({str(folder)!r}), [])")
    with cpu_time(found, "curves of 100,000 records"):
        write_curves_png(folder, own / "curves.png")
    metrics = (folder / "metrics.jsonl").read_bytes()
    writer = MetricsWriter(folder)
    with cpu_time(found, "cut of 100,000 records at a resume"):
        writer.truncate_after(num_records - 50)
    writer.close()
    (folder / "metrics.jsonl").write_bytes(metrics)


def step(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Take steps of ELECTRA-Small on 16 rows of 128 tokens, fp32, without DeepSpeed."""
    _steps("six steps", TOY if smoke else [], 16, found)


def step_modern(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Take steps of the architecture `modern` on 4 rows of 512 tokens, likewise."""
    _steps("six steps of `modern`", [*MODERN, *(TOY if smoke else [])], 4, found)


def _steps(name: str, overrides: Sequence[str], rows: int, found: dict[str, float]) -> None:
    """Enter the processor time of six steps after a first one."""
    import step as bench

    from electra_dist.config.load import load_config

    config = load_config(REPOSITORY / "configs/small.yaml", overrides)
    way, ids_BS = bench.ours(config), bench.synthetic_rows(config, rows)
    bench.take_step(way, ids_BS, 0, "fp32", config.optimizer.clip_norm)
    with cpu_time(found, name):
        for number in range(1, 7):
            bench.take_step(way, ids_BS, number, "fp32", config.optimizer.clip_norm)


def checkpoint(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Save the state of a model of ELECTRA-Base's size six times; the least stall counts."""
    import checkpoint as bench

    with bench.opened("configs/base_size.yaml", smoke) as saves:
        found["least stall of six saves"] = min(saves.ours() for _ in range(6))


def restart(own: Path, smoke: bool, found: dict[str, float]) -> None:
    """Start ELECTRA-Small afresh, and again from the checkpoint of step 2; return the time to the first step."""
    import restart as bench

    shutil.rmtree(own)
    own.mkdir()
    config = bench.write_config(own, smoke)
    for kind in ("fresh start", "resume"):
        with cpu_time(found, f"{kind} and its steps"):
            found[f"{kind} to its first step"] = bench.ours([sys.executable], config, own / "run")["total_s"]


# Name -> (own folder, smoke, found): enters seconds by name into `found`.
CASES: dict[str, Callable[[Path, bool, dict[str, float]], None]] = {
    case.__name__: case
    for case in (loader, first_batch, head, corpus_build, long_runs, step, step_modern, checkpoint, restart)
}


def main(words: Sequence[str]) -> None:
    spec = importlib.util.find_spec("electra_dist")
    assert spec and spec.origin and Path(spec.origin).is_relative_to(Path.cwd()), f"{spec} is of another tree"
    found: dict[str, float] = {}
    CASES[words[0]](Path(words[1]), "--smoke" in words, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
