"""Real training on a GPU through the deepspeed launcher: an uninterrupted run against one killed with SIGKILL.

Guarantee: both runs have the same configuration and steps. The second is killed after a checkpoint and some further
steps, all its processes at once, and started again with the same command. Losses, gradient norms and the receipts of
the rows of every step must be equal; the script fails if the rows differ, if the resumed run did not resume, or, with
`engine.deterministic` or on a CPU, if any figure differs in any bit. Without it the largest difference is printed.

Limits: one rank. Every wait ends at the time limit, and then the processes are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_train_parts.training_process import (
    POLL_S,
    REPOSITORY,
    Json,
    OutOfTime,
    Training,
    compare,
    metrics,
    read_lines,
)

_SMALLEST_SMALL_S = 60  # with less time left, ELECTRA-Small is not started
_STOPPED = 75  # exit code of training that was asked to stop


class Plan(NamedTuple):
    """What is trained: a configuration, its changes, and at which step it is killed."""

    config: Path
    overrides: list[str]
    kill_after: int  # step after which the second run is killed; a few steps behind a checkpoint
    small: Path | None  # configuration of the last run; None leaves it out
    small_overrides: list[str]


def plan_of(smoke: bool, corpus: Path, rows: int) -> Plan:
    """Return the plan of a real or a smoke run.

    Args:
        smoke: Whether to train the demo's model for a few steps.
        corpus: Folder of the corpus, with held-out rows in `heldout/`.
        rows: Micro-batch of ELECTRA-Large, in rows.
    """
    common = [f"data.corpus={corpus}", f"data.heldout={corpus}/heldout", "log.every_steps=1", "log.tensorboard=false"]
    if smoke:
        # Enough steps follow the kill that it comes in time on a fast machine.
        toy = [
            *common,
            "train.num_steps=50",
            "checkpoint.every_steps=10",
            "log.eval_rows=2",
            "log.eval_every_steps=50",
        ]
        toy += ["train.global_batch=4", "train.micro_batch=2"]
        return Plan(REPOSITORY / "configs" / "demo_cpu.yaml", toy, 13, None, [])
    large = [*common, "train.num_steps=40", "checkpoint.every_steps=10", f"train.micro_batch={rows}"]
    # The rates of ELECTRA-Large's first 40 steps, by a warm-up that is not longer than this run.
    large += ["optimizer.lr=8e-7", "optimizer.warmup_steps=40"]
    large += [f"train.global_batch={2 * rows}", "log.eval_every_steps=40", "log.eval_rows=64"]
    small = [*common, "data.seq_len=512", "log.eval_every_steps=1000000", "log.every_steps=20"]
    configs = REPOSITORY / "configs"
    return Plan(configs / "large_25pct_mask.yaml", large, 26, configs / "small.yaml", small)


def is_deterministic(run_dir: Path) -> bool:
    """Return whether a run promises equal bits: every run on a CPU, and with `engine.deterministic` on a GPU."""
    import torch
    import yaml

    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    return not torch.cuda.is_available() or bool(config["engine"].get("deterministic", False))


def speed(run_dir: Path) -> Json:
    """Return the median tokens per second and MFU of the second half of a run's logged steps."""
    logged = list(metrics(run_dir).values())
    second_half = sorted(logged[len(logged) // 2 :], key=lambda record: record["tokens_per_s"])
    if not second_half:
        return {"steps": 0}
    median = second_half[len(second_half) // 2]
    return {"steps": logged[-1]["step"], **{key: median[key] for key in ("tokens_per_s", "mfu", "memory_gb")}}


def exactness(plan: Plan, folder: Path, deadline: float) -> Json:
    """Train without interruption, train again with a kill and a resume, and compare.

    Raises:
        OutOfTime: the time limit came first.
        SystemExit: a run failed, or the second one ended before it was killed.
    """
    whole, killed = folder / "whole", folder / "killed"
    Training(plan.config, whole, plan.overrides, deadline).finish()
    print(f"uninterrupted: {json.dumps(speed(whole))}", flush=True)
    training = Training(plan.config, killed, plan.overrides, deadline)
    if training.wait(until_step=plan.kill_after) is not None:
        sys.exit(f"the run ended before it could be killed; the end of {training.log}:\n{training.tail()}")
    training.kill()
    print(f"killed after step {max(metrics(killed))}", flush=True)
    Training(plan.config, killed, plan.overrides, deadline).finish()
    resumed = [event["step"] for event in read_lines(killed / "ledger.jsonl") if event["event"] == "resume"]
    found = compare(metrics(whole), metrics(killed))
    found |= {"resumed_at": resumed, "deterministic": is_deterministic(killed), "speed": speed(whole)}
    found["right"] = bool(resumed) and found["same_rows"] and (found["bit_for_bit"] or not found["deterministic"])
    return found


def train_small(plan: Plan, folder: Path, deadline: float) -> Json:
    """Train ELECTRA-Small until shortly before the time limit, ask it to stop, and return its speed."""
    assert plan.small is not None
    run_dir = folder / "small"
    stop_at = deadline - 30  # Enough to save and to end.
    training = Training(plan.small, run_dir, plan.small_overrides, deadline)
    while training.process.poll() is None and time.monotonic() < stop_at:
        time.sleep(POLL_S)
    if training.process.poll() is None:
        (run_dir / "stop").touch()
    code = training.wait()
    if code not in (0, _STOPPED):
        print(f"ELECTRA-Small ended with exit code {code}:\n{training.tail()}", flush=True)
    return {"exit_code": code, **speed(run_dir)}


def main() -> None:
    """Run the plan, print and write what was found; exit with 1 if the resumed run is not the uninterrupted one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="train the demo's model for a few steps on the CPU")
    parser.add_argument("--minutes", type=float, default=8, help="time limit (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, help="corpus (default: carried/corpus; with --smoke corpora/demo)")
    parser.add_argument("--rows", type=int, default=64, help="micro-batch of ELECTRA-Large (default: %(default)s)")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    corpus = (arguments.corpus or REPOSITORY / ("corpora/demo" if smoke else "carried/corpus")).absolute()
    if not (corpus / "corpus.json").exists():
        advice = "make pretrain" if smoke else "bash benchmarks/gpu_train.sh --make-carry"
        sys.exit(f"{corpus} holds no corpus.json: run `{advice}` first, or name a corpus with --corpus")
    deadline = time.monotonic() + 60 * arguments.minutes
    plan = plan_of(smoke, corpus, arguments.rows)
    folder = Path(tempfile.mkdtemp(prefix="gpu-train-"))
    output = Path(os.environ["OUT"]) if "OUT" in os.environ else None if smoke else REPOSITORY / "benchmarks/results"
    record: Json = {"benchmark": "gpu_train", "smoke": smoke, "date": time.strftime("%Y%m%d", time.gmtime())}
    try:
        record["exactness"] = exactness(plan, folder, deadline)
        print(json.dumps(record["exactness"], indent=1), flush=True)
        if plan.small and deadline - time.monotonic() > _SMALLEST_SMALL_S:
            record["small"] = train_small(plan, folder, deadline)
            print(f"ELECTRA-Small: {json.dumps(record['small'])}", flush=True)
    except OutOfTime as error:
        record["out_of_time"] = str(error)
    finally:
        if output:
            _write(record, folder, output)
        shutil.rmtree(folder, ignore_errors=True)
    if "out_of_time" in record:
        sys.exit(f"the {arguments.minutes:g} minutes did not suffice: {record['out_of_time']}")
    if not record["exactness"]["right"]:
        sys.exit("the killed and resumed run is not the uninterrupted one: see the figures above")


def _write(record: Json, folder: Path, output: Path) -> None:
    """Write the record, and the logs of all runs as one file, into the output folder."""
    output.mkdir(parents=True, exist_ok=True)
    (output / f"gpu_train-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")
    logs = [f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("*.log"))]
    (output / f"gpu_train-{record['date']}.log").write_text("\n".join(logs))


if __name__ == "__main__":
    main()
