"""Runs `electra_launcher.chaos` on a tiny run of 2 CPU ranks: 60 faults of all kinds in random order.

    python tests/drills/chaos_drill.py --count 60 --seed 1

The fault `disk` fills a file system of a few MB and is included if the user is root, who may mount one. The drill
takes about a quarter of an hour on two idle cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from drill import Drill, at_least_one, options
from electra_launcher.chaos import __main__
from electra_launcher.chaos.faults import FAULTS

EVERY_STEPS = 5


def main() -> int:
    """Run the drill and return its exit code."""
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of kinds, moments and victims")
    parser.add_argument("--count", type=at_least_one, default=60, help="number of faults")
    parser.add_argument("--faults", default=",".join(k for k in FAULTS if k != "disk" or os.geteuid() == 0))
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept afterwards")
    args = parser.parse_args()
    if "disk" not in args.faults.split(","):
        print("without `disk`: mounting a small file system needs root")
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        settings = {
            "train.num_steps": 2 * EVERY_STEPS * (args.count + 1),
            "train.global_batch": 64,  # steps so slow that a fast machine does not finish before the last fault
            "checkpoint.every_steps": EVERY_STEPS,
            "model.hidden_dropout": 0.1,
            "cluster.hang_step_floor_s": 3.0,
            "cluster.hang_setup_s": 180.0,
            "cluster.hang_checkpoint_s": 20.0,
            "cluster.hang_eval_s": 20.0,
        }
        run = Drill(args.keep or Path(temporary), [70, 33, 48, 90, 15], **settings).new_run("run")
        words = ["--count", str(args.count), "--seed", str(args.seed), "--faults", args.faults, "--ranks", "2"]
        return __main__.main([str(run.config), *words])


if __name__ == "__main__":
    sys.exit(main())
