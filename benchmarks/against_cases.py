"""What `against.py` measures, each case in a new process of one of the two source trees.

    python -P benchmarks/against_cases.py CASE OWN SHARED [--smoke]

A case prints seconds by name as JSON. It calls commands, config keys and files of a run, which keep their names, or a
benchmark of the tree; the few names that older commits have instead stand here beside the newer ones. OWN is a folder
that the case may fill once for all rounds of one tree, SHARED one that both trees read. The working directory is the
root of the tree.

"CPU" is the processor time of the process or the command with all of its threads, which other load changes little.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

Seconds = dict[str, float]
LAUNCHER = "electra_launcher" if Path("launcher/electra_launcher").is_dir() else "launcher"
ELECTRA_DIST = f"import sys; sys.argv[0] = 'electra-dist'; from {LAUNCHER}.cli.main import main; main()"
VOCABULARY = 30_522
SMALL = {  # ELECTRA-Small
    "embedding_size": 128,
    "discriminator": {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "intermediate_size": 1024},
    "generator": {"hidden_size": 64, "num_layers": 12, "num_heads": 1, "intermediate_size": 256},
}
BASE = {  # the size of ELECTRA-Base: 1.43 GB of state
    "embedding_size": 768,
    "discriminator": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072},
    "generator": {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "intermediate_size": 1024},
}
MODERN = {  # layers of the architecture `modern` with as many parameters as those of SMALL's discriminator
    "architecture": "modern",
    "embedding_size": 256,
    "discriminator": {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "intermediate_size": 680},
    "generator": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "intermediate_size": 680},
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
TOY = {
    "embedding_size": 64,
    "discriminator": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 256},
    "generator": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 128},
}


@contextmanager
def cpu_time(found: Seconds, name: str, of: int = resource.RUSAGE_SELF) -> Iterator[None]:
    """Enter the processor seconds of the block into `found`: of this process, or of its ended child processes."""
    begin = resource.getrusage(of)
    yield
    end = resource.getrusage(of)
    found[f"{name}, CPU"] = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def run(*command: object) -> None:
    """Run a Python program to its end; end this process with the program's output if it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[:3]} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def random_corpus(folder: Path, num_shards: int, rows: int, seq_len: int = 512) -> Any:
    """Return the store of a corpus of random rows in shards, of which at most three are different; write it once."""
    try:
        from random_corpus import write_corpus
    except ImportError:  # an older commit, whose function wants a text
        from first_batch import write_corpus as write_by_url

        return write_by_url(str(folder), num_shards, rows, min(3, num_shards), seq_len=seq_len)
    if folder.exists():
        from electra_dist.store.open_store import open_store

        return open_store(str(folder))
    return write_corpus(folder, num_shards, rows, min(3, num_shards), seq_len=seq_len)


def loader(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Read three epochs of 49,152 shuffled rows of 512 tokens."""
    import loader_rivals

    readers = loader_rivals.READERS if hasattr(loader_rivals, "READERS") else loader_rivals.VARIANTS
    store = random_corpus(own / "corpus", 3, 1024 if smoke else 16_384)
    found: Seconds = {}
    with cpu_time(found, "loader"):
        for _ in range(3):
            for _ in readers["ours"].read(store, own / "cache"):
                pass
    return found


def first_batch(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Give rank 0 of 8 its first batch at 10 % and at 99 % of an epoch of 3,907 shards, from the open store on."""
    store = random_corpus(own / "corpus", 200 if smoke else 3_907, 1024 if smoke else 16_384)
    try:
        from loader_rivals import our_loader
    except ImportError:  # an older commit
        from first_batch import time_first_batch
    else:

        def time_first_batch(store: Any, cache: Path, epochs: float, window_shards: int) -> None:
            with our_loader(store, cache, 2_048, 8, epochs) as (rows, _):
                rows.next()

    found: Seconds = {}
    with cpu_time(found, "first batch"):
        for epochs in (0.1, 0.99):
            time_first_batch(store, own / "cache", epochs, 64)
    return found


def head(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Run the generator's head forward and backward on 2,048 masked rows of width 256."""
    import torch
    from electra_kernels.mlm_head import mlm_head_loss_and_sample

    num_rows, width = (256, 32) if smoke else (2_048, 256)
    generator = torch.Generator().manual_seed(0)
    x_MD = torch.randn(num_rows, width, generator=generator).requires_grad_()
    table_VD = torch.randn(30_592, width, generator=generator).requires_grad_()
    bias_V = torch.zeros(VOCABULARY, requires_grad=True)
    target_M = torch.randint(VOCABULARY, (num_rows,), generator=generator)
    samples = []
    for step in range(4):
        begin = time.process_time()
        mlm_head_loss_and_sample(
            x_MD,
            table_VD,
            bias_V,
            target_M,
            torch.ones(num_rows),
            seed=1,
            step=step,
            row_M=torch.arange(num_rows),
            vocab_size=VOCABULARY,
        ).loss_sum.backward()
        samples.append(time.process_time() - begin)
    return {"head, CPU": statistics.median(samples[1:])}


def corpus_build(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Build a corpus of the prose of the Python installation with one worker, by the command."""
    shutil.rmtree(own / "built", ignore_errors=True)
    config = write_config(own, own, SMALL, seq_len=512)
    vocab, text = shared / "vocab.txt", shared / "text"
    found: Seconds = {}
    with cpu_time(found, "corpus build", resource.RUSAGE_CHILDREN):
        command = ["corpus", "build", "--input", text, "--output", own / "built", "--config", config, "--vocab", vocab]
        run("-c", ELECTRA_DIST, *command, "--workers", 1)
    return found


def long_runs(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Read a run of 100,000 records: by commands, and by the functions that verify, a model card and a resume use."""
    from support.long_runs import write_long_run

    num_records = 1_000 if smoke else 100_000
    folder = own / "long"
    if not folder.exists():
        write_long_run(folder, num_records)
        _cut(folder, num_records)  # an older commit writes the summary that a real run would have
    found: Seconds = {}
    with cpu_time(found, "status of 100,000 records", resource.RUSAGE_CHILDREN):
        run("-c", ELECTRA_DIST, "status", folder)
    with cpu_time(found, "report of 100,000 records", resource.RUSAGE_CHILDREN):
        run("-c", ELECTRA_DIST, "report", folder, "--output", own / "report.html")
    read_marks = f"import pathlib, {LAUNCHER}.cli.verify as v; v.read_marks(pathlib.Path({str(folder)!r}), [])"
    with cpu_time(found, "receipts of 100,000 records", resource.RUSAGE_CHILDREN):
        run("-c", read_marks)
    from electra_dist.report.curves import write_curves_png

    with cpu_time(found, "curves of 100,000 records"):
        write_curves_png(folder, own / "curves.png")
    metrics = (folder / "metrics.jsonl").read_bytes()
    begin = time.process_time()
    _cut(folder, num_records - 50)
    found["cut of 100,000 records at a resume, CPU"] = time.process_time() - begin
    (folder / "metrics.jsonl").write_bytes(metrics)
    return found


def _cut(folder: Path, step: int) -> None:
    """Drop the records after a step, as a resume does."""
    try:
        from electra_dist.run.metrics import MetricsWriter
    except ImportError:  # an older commit
        from electra_dist.run.writers.metrics_writer import MetricsWriter

        writer = MetricsWriter(folder, tensorboard=False)
    else:
        writer = MetricsWriter(folder)
    writer.truncate_after(step)
    writer.close()


def step(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Take steps of ELECTRA-Small on 16 rows of 128 tokens, fp32, without DeepSpeed."""
    return {"step, CPU": _step_s(own, TOY if smoke else SMALL, 128, 16)}


def step_modern(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Take steps of the architecture `modern` on 4 rows of 512 tokens, likewise."""
    return {"step of `modern`, CPU": _step_s(own, (TOY | {"architecture": "modern"}) if smoke else MODERN, 512, 4)}


def _step_s(own: Path, model: dict[str, Any], seq_len: int, rows: int) -> float:
    """Return the median processor time of six steps after a first one."""
    config_file = write_config(own, own, model, seq_len)
    try:
        from step_ways import ours, synthetic_rows, take_step

        from electra_dist.config.load import load_config

        config = load_config(config_file)
        way, rows_RS = ours(config), synthetic_rows(config, rows)
    except ImportError:  # an older commit
        from electra_dist.config_file import load_config
        from step_parts.variants import SPECIAL, ours, synthetic_rows, take_step

        config = load_config(config_file)
        way, rows_RS = ours(config, SPECIAL), synthetic_rows(config, "none", rows, full_share=1.0)
    samples = []
    for number in range(7):
        begin = time.process_time()
        take_step(way, rows_RS, number, "fp32", config.optimizer.clip_norm)
        samples.append(time.process_time() - begin)
    return statistics.median(samples[1:])


def checkpoint(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Save the state of ELECTRA-Base after each of six steps; return the least stall of the training."""
    run_dir = own / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {"train": {"num_steps": 6, "global_batch": 1}, "checkpoint": {"every_steps": 1, "keep_last": 1}}
    train(write_config(own, run_dir, TOY if smoke else BASE, 128, **settings))
    stalls = [event["stall_s"] for event in read_ledger(run_dir) if event["event"] == "checkpoint"]
    shutil.rmtree(run_dir)
    return {"least stall of six saves": min(stalls)}


def restart(own: Path, shared: Path, smoke: bool) -> Seconds:
    """Start ELECTRA-Small afresh, and again from the checkpoint of step 2; return the time to the first step."""
    run_dir = own / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {"train": {"num_steps": 4, "global_batch": 4}, "checkpoint": {"every_steps": 2}}
    config = write_config(own, run_dir, TOY if smoke else SMALL, 128, **settings)
    found: Seconds = {}
    for kind in ("fresh start", "resume"):
        begin = time.time()
        with cpu_time(found, f"{kind} and its steps", resource.RUSAGE_CHILDREN):
            train(config)
        ledger = read_ledger(run_dir)
        started = [event for event in ledger if event["event"] in ("start", "resume")][-1]
        first_s = [event["spent_s"]["first"] for event in ledger if "spent_s" in event][-1]
        found[f"{kind} to its first step"] = datetime.fromisoformat(started["time"]).timestamp() - begin + first_s
        for folder in (run_dir / "checkpoints").glob("step-*"):
            if int(folder.name.split("-")[1]) > 2:
                shutil.rmtree(folder)
    return found


def write_config(own: Path, run_dir: Path, model: dict[str, Any], seq_len: int, **sections: dict[str, Any]) -> Path:
    """Write the config of a run on random rows, one CPU rank, and return its path; write the rows once."""
    import yaml

    corpus = own / f"corpus-{seq_len}"
    random_corpus(corpus, 2, 512, seq_len)
    training = sections.get("train", {"num_steps": 1, "global_batch": 1})
    tree: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": model | {"vocab_size": VOCABULARY, "max_positions": 512},
        "data": {"corpus": str(corpus), "seq_len": seq_len},
        "optimizer": {"warmup_steps": 1},
        "log": {"every_steps": 1},
        **sections,
        "train": training | {"micro_batch": training["global_batch"], "precision": "fp32"},
    }
    (own / "config.yaml").write_text(yaml.safe_dump(tree))
    return own / "config.yaml"


def train(config: Path) -> None:
    """Train with the config in a process of its own, to the last step."""
    run("-m", f"{LAUNCHER}.pretrain", "--config", config)


def read_ledger(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


CASES: dict[str, Callable[[Path, Path, bool], Seconds]] = {
    case.__name__: case
    for case in (loader, first_batch, head, corpus_build, long_runs, step, step_modern, checkpoint, restart)
}


def main(words: Sequence[str]) -> None:
    """Measure the case that the words name, and print its seconds."""
    spec = importlib.util.find_spec("electra_dist")
    assert spec and spec.origin and Path(spec.origin).is_relative_to(Path.cwd()), f"{spec} is of another tree"
    own, shared = map(Path, words[1:3])
    print(json.dumps(CASES[words[0]](own, shared, "--smoke" in words)))


if __name__ == "__main__":
    main(sys.argv[1:])
