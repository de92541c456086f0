"""Trains through thousands of S3 faults: the losses, rows and receipt must be those of a run on local files.

    python tests/drills/s3_faults.py --seed 1 --faults 2000

Corpus and checkpoints of a run of 2 ranks lie on a real S3 server (radosgw where it is installed, otherwise moto)
behind `tests/support/fault_server.py`, which injects faults of all its kinds by a seeded schedule. The cache is
smaller than the corpus, so that shards are fetched repeatedly. All processes are killed -9 once, so that a checkpoint
is loaded through the faults, too. Every loss must be that of a run on local files, bit for bit, and
`electra-dist verify` must find the run good. Then one shard can never be read: the run must end with exit code 78 and
one line that names the shard. The drill prints a table and exits with 1 if a verdict is bad.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.fault_server import ALL_FAULTS, FaultPlan, FaultProxy, running_faults
from support.real_runs import (
    DrillVerdict,
    deepspeed_command,
    kill_session,
    print_verdicts,
    read_losses,
    started,
    step_records,
    wait_until,
    write_corpus,
    write_tiny_config,
)
from support.s3_server import best_kind, make_bucket, running_s3

RATE = 0.7  # share of requests that are hit, at most 3 in a row
# `flip` only hits objects whose digest reveals a flipped byte: shards, tensor files and manifests. `missing` only hits
# objects that are known to exist when they are requested; for other objects the answer would be believed.
EVERYWHERE = tuple(kind for kind in ALL_FAULTS if kind not in ("flip", "missing"))
FLIPPED, MISSED = (".tar", ".safetensors", "/manifest.json"), (".tar", ".safetensors")
FAULTS = (*EVERYWHERE, *(f"flip:{text}" for text in FLIPPED), *(f"missing:{text}" for text in MISSED))
ROWS_PER_SHARD = [1 + number % 5 for number in range(300)]  # 5 or 6 shards a step
CACHE_LIMIT_GB = 0.0005  # the corpus has 0.003 GB
STALL_S = 0.3


def settings(num_steps: int) -> dict[str, object]:
    """Return the settings of all runs of this drill."""
    return {
        "train.num_steps": num_steps,
        "model.hidden_dropout": 0.1,
        "data.shuffle_window_shards": 8,
        "data.heldout": None,
        "checkpoint.every_steps": 5,
    }


def on_s3(bucket: str, proxy: FaultProxy) -> dict[str, object]:
    """Return the settings that place corpus and checkpoints behind the fault proxy."""
    return {
        "data.endpoint_url": proxy.endpoint_url,
        "data.cache_limit_gb": CACHE_LIMIT_GB,
        "checkpoint.endpoint_url": proxy.endpoint_url,
        "checkpoint.targets": [f"{bucket}/checkpoints"],
    }


def run_to_the_end(config: Path) -> subprocess.CompletedProcess[str]:
    """Start a run on 2 ranks and wait for its end."""
    return subprocess.run(deepspeed_command(config, 2), capture_output=True, text=True, timeout=900)


def kill_and_start_again(config: Path, run_dir: Path, step: int) -> list[dict]:
    """Kill all processes at `step` and start again; return the last step records of both starts."""
    with started(config, 2, run_dir.with_suffix(".log")) as process:
        wait_until(lambda: len(step_records(run_dir)) >= step, process, timeout_s=600)
        kill_session(process.pid)
    first = step_records(run_dir)[-1]
    done = run_to_the_end(config)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [first, step_records(run_dir)[-1]]


def faults_of(proxy: FaultProxy) -> Counter[str]:
    """Return the number of faults by kind, from the proxy's own page."""
    with urllib.request.urlopen(f"{proxy.endpoint_url}/-/faults") as answer:
        return Counter(json.load(answer))


def survives(folder: Path, bucket: str, upstream: str, seed: int, faults: int) -> list[DrillVerdict]:
    """Compare a long run behind all faults with a run on local files.

    Args:
        folder: where the run folders are made; holds the local corpus.
        bucket: URL of a bucket that holds the same corpus.
        upstream: endpoint URL of the S3 server.
        seed: seed of the schedule of faults.
        faults: least number of faults to inject.
    """
    num_steps = max(40, faults // 13)
    local, remote = folder / "local", folder / "remote"
    done = run_to_the_end(write_tiny_config(folder / "local.yaml", local, f"{folder}/corpus", **settings(num_steps)))
    assert done.returncode == 0, done.stderr[-4000:]
    with running_faults(upstream, FaultPlan(seed=seed, rate=RATE, faults=FAULTS, stall_s=STALL_S)) as proxy:
        config = write_tiny_config(
            folder / "remote.yaml", remote, f"{bucket}/corpus", **settings(num_steps), **on_s3(bucket, proxy)
        )
        ends = kill_and_start_again(config, remote, num_steps // 2)
        verify = subprocess.run(
            [str(Path(sys.executable).parent / "electra-dist"), "verify", str(remote)], capture_output=True, text=True
        )
        counts, requests = faults_of(proxy), proxy.plan.requests
        hit = Counter(line.split()[0] for line in proxy.plan.log if "/checkpoints/" in line)
    print(f"{requests} requests, {counts.total()} faults ({hit.total()} of them on checkpoints):")
    for kind in ALL_FAULTS:
        print(f"  {kind:10} {counts[kind]:6}   on checkpoints {hit[kind]:5}")
    for name, end in zip(("until the kill", "after it"), ends):
        print(
            f"  {name}: step {end['step']}, store_retries {end['store_retries']}, "
            f"store_wait_s {end['store_wait_s']:.1f}, refetches {end['refetches']}"
        )
    events = [json.loads(line) for line in (remote / "ledger.jsonl").read_text().splitlines()]
    saved = sum(event["event"] == "checkpoint" for event in events)
    aside = [event["reason"] for event in events if event["event"] == "set_aside"]
    found, expected = read_losses(remote), read_losses(local)
    receipts = [[record["receipt"] for record in step_records(run)] for run in (remote, local)]
    same = sum(one == two for one, two in zip(found, expected))
    good_verify = verify.returncode == 0 and "good:" in verify.stdout
    retries, waited_s = (sum(end[key] for end in ends) for key in ("store_retries", "store_wait_s"))
    return [
        DrillVerdict(
            "faults injected", counts.total() >= faults and set(counts) == set(ALL_FAULTS), str(counts.total())
        ),
        DrillVerdict("losses of local files", found == expected, f"{same} of {num_steps} steps equal bit for bit"),
        DrillVerdict(
            "receipts of local files", receipts[0] == receipts[1], f"{receipts[0][-1]} after {num_steps} steps"
        ),
        DrillVerdict("electra-dist verify", good_verify, (verify.stdout + verify.stderr).strip().splitlines()[-1]),
        DrillVerdict(
            "good checkpoints are believed", not aside, aside[0] if aside else f"{saved} saved, none set aside"
        ),
        DrillVerdict("cost is visible", retries > 0 and waited_s > 0, f"{retries} retries, {waited_s:.0f} s waited"),
    ]


def ends_naming_the_shard(folder: Path, bucket: str, upstream: str, fault: str, shard: str) -> DrillVerdict:
    """Check that a run ends with exit code 78 and one line that names a shard on which every read fails by `fault`."""
    plan = FaultPlan(rate=1.0, faults=(fault,), only=shard, in_a_row=10**9)
    with running_faults(upstream, plan) as proxy:
        run_dir = folder / f"lost-{fault}"
        config = write_tiny_config(
            folder / f"lost-{fault}.yaml",
            run_dir,
            f"{bucket}/corpus",
            **{**settings(100), "data.endpoint_url": proxy.endpoint_url},
        )
        done = run_to_the_end(config)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error: ")]
    good = done.returncode == 78 and len(lines) == 1 and shard in lines[0]
    shown = lines[0] if lines else (done.stderr.strip().splitlines() or ["no line"])[-1]
    return DrillVerdict(
        f"shard always {fault}", good, f"exit {done.returncode} after step {len(step_records(run_dir))}: {shown}"
    )


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule of faults")
    parser.add_argument("--faults", type=int, default=2000, help="least number of faults")
    args = parser.parse_args()
    if args.faults < 1:
        parser.error(f"--faults must be at least 1, not {args.faults}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end, too
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="s3-faults-") as name, running_s3() as server:
        folder = Path(name)
        os.environ.update(server.env)
        bucket = make_bucket(server.endpoint_url, server.env, f"drill-{args.seed}")
        write_corpus(str(folder / "corpus"), ROWS_PER_SHARD)
        write_corpus(f"{bucket}/corpus", ROWS_PER_SHARD, endpoint_url=server.endpoint_url)
        verdicts = survives(folder, bucket, server.endpoint_url, args.seed, args.faults)
        for fault in ("missing", "flip"):
            verdicts.append(ends_naming_the_shard(folder, bucket, server.endpoint_url, fault, "shard-000123"))
    return print_verdicts(f"{best_kind()}, seed {args.seed}, {time.monotonic() - begin:.0f} s", verdicts)


if __name__ == "__main__":
    sys.exit(main())
