"""Runs `electra_launcher.chaos` on a tiny run of 2 CPU ranks: 60 faults of all kinds in random order.

    python tests/drills/chaos_drill.py --count 60 --seed 1

The fault `disk` fills a file system of a few MB and is included if the user is root, who may mount one. The drill
takes about a quarter of an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from electra_launcher.chaos import __main__
from electra_launcher.chaos.faults import FAULTS
from support.real_runs import write_corpus, write_tiny_config

EVERY_STEPS = 5


def main() -> int:
    """Run the drill and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of kinds, moments and victims")
    parser.add_argument("--count", type=int, default=60, help="number of faults")
    parser.add_argument("--faults", default=",".join(k for k in FAULTS if k != "disk" or os.geteuid() == 0))
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept afterwards")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count must be at least 1, not {args.count}")
    if "disk" not in args.faults.split(","):
        print("without `disk`: mounting a small file system needs root")
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = args.keep or Path(temporary)
        write_corpus(str(folder / "corpus"), [70, 33, 48, 90, 15])
        settings = {
            "train.num_steps": 2 * EVERY_STEPS * (args.count + 1),
            "train.global_batch": 64,  # steps so slow that a fast machine does not finish before the last fault
            "checkpoint.every_steps": EVERY_STEPS,
            "model.hidden_dropout": 0.1,
            "data.heldout": None,
            "cluster.hang_step_floor_s": 3.0,
            "cluster.hang_setup_s": 180.0,
            "cluster.hang_checkpoint_s": 20.0,
            "cluster.hang_eval_s": 20.0,
        }
        config = write_tiny_config(folder / "run.yaml", folder / "run", str(folder / "corpus"), **settings)
        options = ["--count", str(args.count), "--seed", str(args.seed), "--faults", args.faults, "--ranks", "2"]
        return __main__.main([str(config), *options])


if __name__ == "__main__":
    sys.exit(main())
