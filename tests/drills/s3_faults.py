"""Trains through thousands of S3 faults: the losses, rows and receipt must be those of a run on local files.

    python tests/drills/s3_faults.py --seed 1 --faults 2000

Corpus and checkpoints of a run of 2 ranks lie on a real S3 server (radosgw where it is installed, otherwise moto)
behind `tests/support/fault_server.py`, which injects faults of all its kinds by a seeded schedule. The cache is
smaller than the corpus, so that shards are fetched repeatedly. All processes are killed -9 once, so that a checkpoint
is loaded through the faults, too. Every loss must be that of a run on local files, bit for bit, and
`electra-dist verify` must find the run good. The drill prints a table and exits with 1 if a verdict is bad. A shard
that can never be read is a way of s3_ways.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

from drill import Drill, Verdict, at_least_one, command, first_difference, options, print_verdicts
from support.fault_server import ALL_FAULTS, FaultPlan, FaultProxy, running_faults
from support.real_runs import kill_session, started, step_records, wait_until
from support.s3_server import best_kind

RATE = 0.7  # share of requests that are hit, at most 3 in a row
# `flip` only hits objects whose digest reveals a flipped byte: shards, tensor files and manifests. `missing` only hits
# objects that are known to exist when they are requested; for other objects the answer would be believed.
EVERYWHERE = tuple(kind for kind in ALL_FAULTS if kind not in ("flip", "missing"))
FLIPPED, MISSED = (".tar", ".safetensors", "/manifest.json"), (".tar", ".safetensors")
FAULTS = (*EVERYWHERE, *(f"flip:{text}" for text in FLIPPED), *(f"missing:{text}" for text in MISSED))
ROWS_PER_SHARD = [1 + number % 5 for number in range(300)]  # 5 or 6 shards a step
CACHE_LIMIT_GB = 0.0005  # the corpus has 0.003 GB
STALL_S = 0.3


def faults_of(proxy: FaultProxy) -> Counter[str]:
    """Return the number of faults by kind, from the proxy's own page."""
    with urllib.request.urlopen(f"{proxy.endpoint_url}/-/faults") as answer:
        return Counter(json.load(answer))


def survives(drill: Drill, bucket: str, upstream: str, seed: int, faults: int) -> list[Verdict]:
    """Compare a long run behind at least so many faults, which is killed once, with a run on local files."""
    num_steps = max(40, faults // 13)
    expected = drill.twin(**{"train.num_steps": num_steps}).steps()
    with running_faults(upstream, FaultPlan(seed=seed, rate=RATE, faults=FAULTS, stall_s=STALL_S)) as proxy:
        places = drill.s3_settings(bucket, proxy.endpoint_url, "checkpoints")
        run = drill.new_run(
            "remote", **places, **{"train.num_steps": num_steps, "data.cache_limit_gb": CACHE_LIMIT_GB}
        )
        with started(run.config, run.ranks, run.output) as process:
            wait_until(lambda: len(step_records(run.folder)) >= num_steps // 2, process, timeout_s=600)
            kill_session(process.pid)
        ends = [step_records(run.folder)[-1]]
        run.train()
        ends.append(step_records(run.folder)[-1])
        verify = subprocess.run(command("electra-dist", "verify", run.folder), capture_output=True, text=True)
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
    events = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    saved = sum(event["event"] == "checkpoint" for event in events)
    aside = [event["reason"] for event in events if event["event"] == "set_aside"]
    difference = first_difference(run.steps(), expected)
    is_verified = verify.returncode == 0 and "good:" in verify.stdout
    retries, waited_s = (sum(end[key] for end in ends) for key in ("store_retries", "store_wait_s"))
    return [
        Verdict("faults injected", counts.total() >= faults and set(counts) == set(ALL_FAULTS), str(counts.total())),
        Verdict(
            "losses and rows of local files",
            not difference,
            difference or f"{num_steps} steps and their receipts equal bit for bit",
        ),
        Verdict("electra-dist verify", is_verified, (verify.stderr + verify.stdout).strip().splitlines()[-1]),
        Verdict("good checkpoints are believed", not aside, aside[0] if aside else f"{saved} saved, none set aside"),
        Verdict("cost is visible", retries > 0 and waited_s > 0, f"{retries} retries, {waited_s:.0f} s waited"),
    ]


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule of faults")
    parser.add_argument("--faults", type=at_least_one, default=2000, help="least number of faults")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end, too
    begin = time.monotonic()
    settings = {"model.hidden_dropout": 0.1, "data.shuffle_window_shards": 8, "checkpoint.every_steps": 5}
    with tempfile.TemporaryDirectory(prefix="s3-faults-") as folder:
        drill = Drill(Path(folder), ROWS_PER_SHARD, **settings)
        with drill.on_s3() as (upstream, bucket):
            verdicts = survives(drill, bucket, upstream, args.seed, args.faults)
    return print_verdicts(f"{best_kind()}, seed {args.seed}, {time.monotonic() - begin:.0f} s", verdicts)


if __name__ == "__main__":
    sys.exit(main())
