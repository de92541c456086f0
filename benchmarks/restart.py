"""How long does a start take until its first step is done, fresh and resumed, beside a plain DeepSpeed script?

    python benchmarks/run.py restart          # configs/small.yaml, 16 rows of 128, one CPU rank, ZeRO-1, fp32

How: our launcher and `restart_rival.py` are started by `deepspeed --num_gpus 1`, in turn, with the same model and
settings. Ours reads a corpus, verifies shards and checkpoint by their digests, and writes ledger, metrics and report;
the plain script does none of this. The seconds of the parts of a start are ours from the ledger.

Limits: one rank on one machine with a warm page cache. The smoke run starts toy models with plain Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from measure import Found, Json, ResultLine, format_summary, print_table, ratio, run_child, small_config, write_corpus

from electra_dist.run import history
from electra_dist.run.ledger import read_ledger

ROUNDS = 2
PARTS = ("launch and import", "build", "restore", "first step")
SAVED, LAST = 2, 4  # The steps after which the run saves. The resume starts from the first of the two.


def run(launcher: Sequence[str], *words: object) -> tuple[float, str]:
    """Run a command of at most 600 s; return the Unix time at which it started, and its stdout."""
    begin = time.time()
    return begin, run_child([*launcher, *map(str, words)], timeout=600)


def ours(launcher: Sequence[str], config: Path, run_dir: Path) -> Json:
    """Start our training once; return `resumed`, `seconds` of each of `PARTS`, and `total_s`.

    Checkpoints later than the one of step `SAVED` are deleted, so that the next start resumes from that step.
    """
    begin, _ = run(launcher, "launcher/pretrain.py", "--config", config)
    start = history.starts(read_ledger(run_dir))[-1]
    seconds = {part: start.setup[part] for part in ("build", "restore")} | {"first step": start.spent["first"]}
    ready = start.events[0].unix_s - begin
    # Launch and import are one part, because the time between them, the process's start, is known only to a second.
    seconds["launch and import"] = ready - seconds["build"] - seconds["restore"]
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.split("-")[1]) > SAVED:
            shutil.rmtree(folder)
    return {"resumed": start.events[0].event == "resume", "seconds": seconds, "total_s": ready + start.spent["first"]}


def theirs(launcher: Sequence[str], config: Path, folder: Path) -> Json:
    """Start the plain DeepSpeed script once; return what `ours` returns. It resumes if `folder` has a checkpoint."""
    begin, output = run(launcher, "benchmarks/restart_rival.py", "--config", config, "--folder", folder)
    report = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    seconds = {"launch and import": report["imported"] - begin, **report["seconds"]}
    return {"resumed": report["resumed"], "seconds": seconds, "total_s": report["first_step_done"] - begin}


def write_config(folder: Path, smoke: bool) -> Path:
    """Write a random corpus and the config of a run of `LAST` steps on it; return the config's path."""
    small = small_config(smoke)
    write_corpus(folder / "corpus", 2, 512, 2, seq_len=small.data.seq_len, vocab_size=small.model.vocab_size)
    tree = small.model_dump(mode="json")
    tree["run_dir"] = str(folder / "run")
    tree["data"] |= {"corpus": str(folder / "corpus"), "heldout": None}
    tree["train"] |= {"num_steps": LAST, "global_batch": 16, "micro_batch": 16, "precision": "fp32"}
    tree["optimizer"] |= {"warmup_steps": LAST}
    tree["checkpoint"] |= {"every_steps": SAVED}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def time_starts(smoke: bool, rounds: int) -> Json:
    """Start both in turn, first fresh and then resuming, with a new folder in each round; return all starts."""
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "1", "--master_port", "0"]
    launcher = [sys.executable] if smoke else deepspeed
    found: Json = {kind: {"ours": [], "DeepSpeed": []} for kind in ("fresh", "resume")}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="restart-") as name:
            folder = Path(name)
            config = write_config(folder, smoke)
            for kind, by in found.items():
                by["ours"].append(ours(launcher, config, folder / "run"))
                by["DeepSpeed"].append(theirs(launcher, config, folder / "plain"))
                for who, starts in by.items():
                    resumed = starts[-1]["resumed"]
                    assert resumed == (kind == "resume"), f"{who}: a {kind} start has resumed={resumed}"
    return found


def measure(arguments: argparse.Namespace) -> Found:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = time_starts(arguments.smoke, arguments.rounds)
    facts = "a toy" if arguments.smoke else "ELECTRA-Small, 1 CPU rank"
    lines = []
    for kind, by in found.items():
        totals = {who: [start["total_s"] for start in starts] for who, starts in by.items()}
        rows = []
        for who, starts in by.items():
            parts = [statistics.median(start["seconds"][part] for start in starts) for part in PARTS]
            over = format_summary(ratio(totals[who], totals["ours"]))
            rows.append([who, format_summary(totals[who]), *(f"{part:.2f}" for part in parts), over])
        print_table([kind, "seconds", *PARTS, "/ ours"], rows)
        value = f"{statistics.median(totals['ours']):.1f} s"
        times = f"{ratio(totals['ours'], totals['DeepSpeed'])['median']:.2f} of a plain DeepSpeed script's"
        lines.append(ResultLine(f"command to first step done, {kind}, {facts}", value, times))
    return Found(lines, {"starts": found})
