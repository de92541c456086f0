"""From typing the command to the first step done: a fresh start and a resume, ours and a plain DeepSpeed script.

    python benchmarks/restart.py          # configs/small.yaml, 16 rows of 128, one CPU rank, ZeRO-1, fp32

Both are started by `deepspeed --num_gpus 1`, in turn, on the same model and settings; ours reads a corpus, verifies
shards and checkpoint by their digests, and keeps ledger, metrics and report; `restart_rival.py` does none of it. The
parts, in seconds (ours from the ledger's setup_s and spent_s):

    launch and import    the launcher, the rank's interpreter and its imports
    build                inputs, process group, model, engine
    restore              the checkpoint (fresh: looking for one)
    first step           until it is done, its wait for data included

Where it stops: one rank, one machine, a warm page cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import yaml
from first_batch import write_corpus
from measure import REPOSITORY, TOY, Json, ResultLine, finish, parser, print_table, ratio, summary, told

from electra_dist.config_file import load_config
from electra_dist.run.ledger import read_ledger

PARTS = ("launch and import", "build", "restore", "first step")
SAVED, LAST = 2, 4  # steps: the fresh start is resumed from the first


def run(launcher: Sequence[str], *words: object) -> tuple[float, str]:
    """Start a command and wait for its end; when it was typed, and what it said."""
    command, begin = [*launcher, *map(str, words)], time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPOSITORY)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return begin, done.stdout


def ours(launcher: Sequence[str], config: Path, run_dir: Path) -> Json:
    """One start of ours; afterwards the run folder is as if it had been killed behind its first checkpoint."""
    begin, _ = run(launcher, "launcher/pretrain.py", "--config", config)
    ledger = read_ledger(run_dir)
    start = [event for event in ledger if event["event"] in ("start", "resume")][-1]
    spent = [event["spent_s"] for event in ledger if "spent_s" in event][-1]
    seconds = {
        "build": start["setup_s"]["build"],
        "restore": start["setup_s"]["restore"],
        "first step": spent["first"],
    }
    ready = datetime.fromisoformat(start["time"]).timestamp() - begin
    # One part, because the kernel tells a process's start to a second only.
    seconds["launch and import"] = ready - seconds["build"] - seconds["restore"]
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.partition("-")[2].split("-")[0]) > SAVED:
            shutil.rmtree(folder)
    return {"resumed": start["event"] == "resume", "seconds": seconds, "total_s": ready + spent["first"]}


def theirs(launcher: Sequence[str], config: Path, folder: Path) -> Json:
    """One start of the plain script."""
    begin, said = run(launcher, "benchmarks/restart_rival.py", "--config", config, "--folder", folder)
    told_by_it = json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("{")))
    seconds = {"launch and import": told_by_it["imported"] - begin, **told_by_it["seconds"]}
    return {"resumed": told_by_it["resumed"], "seconds": seconds, "total_s": told_by_it["first_step_done"] - begin}


def write_config(folder: Path, smoke: bool) -> Path:
    """The run: `LAST` steps on a corpus of its own."""
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if smoke else []
    small = load_config(REPOSITORY / "configs/small.yaml", toy)
    write_corpus(str(folder / "corpus"), 2, 512, 2, seq_len=small.data.seq_len, vocab_size=small.model.vocab_size)
    tree = small.model_dump(mode="json")
    tree["run_dir"] = str(folder / "run")
    tree["data"] |= {"corpus": str(folder / "corpus"), "heldout": None}
    tree["train"] |= {"num_steps": LAST, "global_batch": 16, "micro_batch": 16, "precision": "fp32"}
    tree["checkpoint"] |= {"every_steps": SAVED}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def measure(smoke: bool, rounds: int) -> Json:
    """All starts of all rounds: found[fresh or resume][who] is a list."""
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
                assert all(starts[-1]["resumed"] == (kind == "resume") for starts in by.values())
    return found


def report(found: Json, facts: str) -> list[ResultLine]:
    lines = []
    for kind, by in found.items():
        totals = {who: [start["total_s"] for start in starts] for who, starts in by.items()}
        rows = []
        for who, starts in by.items():
            parts = [summary([start["seconds"][part] for start in starts])["median"] for part in PARTS]
            over = told(ratio(totals[who], totals["ours"]))
            rows.append([who, told(summary(totals[who])), *(f"{part:.2f}" for part in parts), over])
        print_table([kind, "seconds", *PARTS, "/ ours"], rows)
        print()
        value = f"{summary(totals['ours'])['median']:.1f} s"
        times = f"{ratio(totals['ours'], totals['DeepSpeed'])['median']:.2f} of a plain DeepSpeed script's"
        lines.append(ResultLine(f"command to first step done, {kind}, {facts}", value, times))
    return lines


def main(argv: Sequence[str] | None = None) -> Json:
    arguments = parser(__doc__, rounds=3).parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = measure(arguments.smoke, arguments.rounds)
    lines = report(found, "a toy" if arguments.smoke else "ELECTRA-Small, 1 CPU rank")
    return finish("restart", arguments, argv, lines, starts=found)


if __name__ == "__main__":
    main()
