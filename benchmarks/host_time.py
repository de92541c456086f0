"""Time the host's side of a micro-batch without a GPU, for this checkout and for others, in turn.

    python benchmarks/host_time.py --save                      # ELECTRA-Large, 8 rows in bf16, this checkout
    python benchmarks/host_time.py --against ../older ../old   # and other checkouts, for example git worktrees

A micro-batch, forward and backward, runs on torch's device `meta` by the GPU's branch, as the rehearsal runs it
(tests/support/rehearsal.py): the same operators, and launches of Triton that are recorded instead of made. What is
printed is the time that one core spends on it.

Guarantee: each checkout runs in processes of its own with its own sources and its own rehearsal, in turn, round after
round. The time is that of the processor (`time.process_time`), in which other programs of the machine hardly count.

Limits: it is no time of a run on a GPU. A launch by CUDA or Triton costs nothing here, and `meta` has its own cost for
each operator: some of its shape rules are written in Python. Use it to compare checkouts, beside the number of
operators in tests/rehearsal/recorded.json. DeepSpeed and the optimizer are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure import RESULTS, Json, finish, format_summary, print_table, ratio, summary

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = 8
PASSES = 5  # timed micro-batches of a process, after one that is not timed


def time_passes(config_file: str) -> list[float]:
    """Return the processor's milliseconds of each micro-batch, by the rehearsal that is on the search path."""
    from support.rehearsal import build, gpu_branch, step_input

    from electra_dist.config_file import load_config

    config = load_config(Path(config_file), ["train.precision=bf16"])
    module = build(config)
    milliseconds = []
    with gpu_branch():
        for _ in range(PASSES + 1):
            module.zero_grad()
            gc.collect()
            begin = time.process_time()
            module(step_input(config, module, ROWS)).loss.backward()
            milliseconds.append(1e3 * (time.process_time() - begin))
    return milliseconds[1:]


def time_checkout(checkout: Path, config_file: str) -> float:
    """Return the median milliseconds of a micro-batch by the sources of a checkout, in a new process.

    Raises:
        CalledProcessError: the checkout has no rehearsal, or it failed; the process has printed why.
    """
    search_path = os.pathsep.join(str(checkout / folder) for folder in ("", "kernels", "tests"))
    environment = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--config", config_file, "--this-process"]
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def name_of(checkout: Path) -> str:
    """Return the short commit of a checkout, followed by "+" if tracked files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> Json | None:
    """Time all checkouts in turn, print their medians and ratios, and return the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--config", default="configs/large_25pct_mask.yaml", help="config file in each checkout")
    options.add_argument("--against", type=Path, nargs="+", default=[], help="other checkouts to time")
    options.add_argument("--rounds", type=int, default=5, help="processes of each checkout (default: %(default)s)")
    options.add_argument(
        "--save", nargs="?", type=Path, const=RESULTS, metavar="FOLDER", help="write the record as JSON into FOLDER"
    )
    options.add_argument("--this-process", action="store_true", help="time once, with the sources on PYTHONPATH")
    arguments = options.parse_args(argv)
    if arguments.this_process:
        print(json.dumps(time_passes(arguments.config)))
        return None
    checkouts = {name_of(path): path.resolve() for path in [*arguments.against, REPOSITORY]}
    milliseconds: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(arguments.rounds):
        for name, checkout in checkouts.items():
            milliseconds[name].append(time_checkout(checkout, arguments.config))
    first = next(iter(checkouts))
    rows = [
        [name, format_summary(summary(values), ".0f"), format_summary(ratio(values, milliseconds[first]))]
        for name, values in milliseconds.items()
    ]
    print_table(["commit", "host ms a micro-batch, on meta", f"of {first}"], rows)
    arguments.smoke = False
    return finish("host_time", arguments, argv, [], rows=ROWS, milliseconds=milliseconds)


if __name__ == "__main__":
    main()
