"""Whether this node is fit for a run, before the run: GPUs, disks, storage, clock; with several ranks, their network.

srun --ntasks-per-node=1 python -m launcher.preflight --config C     each node by itself
deepspeed ... --module launcher.preflight --config C                 all ranks together: who is slow

Guarantees: one line per finding, with the node, the device and the next step. Exit 0: go; 69: this node is unhealthy,
a strike was added to the run's list, go without it; 78: something that only the user can mend (disk, storage, config);
1: the ranks cannot work together and nobody can be blamed. `check_node` imports no torch and needs no GPU.

Cost: a second by itself; with GPUs 3 s of matrix products and torch's import.

Where it stops: see gpu_checks, disk_checks, storage_checks and rank_checks, which decide.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_UNHEALTHY, EXIT_USER_ERROR, UserError
from electra_dist.nvml import GpuProbe
from electra_dist.run.strikes import Strike, add_strike, node_name
from launcher.preflight.findings import Finding, as_json, exit_code, print_findings, strike_of
from launcher.preflight.gpu_checks import judge_gpus
from launcher.preflight.storage_checks import check_storage


def check_node(config: Config, node: str) -> list[Finding]:
    """What can be found without torch and without other nodes, GPUs first."""
    return check_gpus(node) + check_storage(config, node)


def check_gpus(node: str) -> list[Finding]:
    """The GPUs at rest; one line where there are none."""
    probe = GpuProbe.open()
    if probe is None:
        return [Finding(severity="ok", node=node, what="no GPU that NVML knows of (or no nvidia-ml-py): not checked")]
    try:
        return judge_gpus(probe.health(), node)
    finally:
        probe.close()


def preflight(run_dir: Path, arguments: Sequence[str], limit_s: float) -> int:
    """This check as a process of its own; its exit code. One that is not over within `limit_s` seconds hangs in a
    driver, where nothing may be able to end it: it is left behind, and the node gets its strike here."""
    process = subprocess.Popen([sys.executable, "-m", "launcher.preflight", *arguments])
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        reason = f"the checks before the start were not over within {limit_s:.0f} s"
        add_strike(run_dir, Strike(time=time.time(), node=node_name(), device="", reason=reason, by="preflight"))
        return EXIT_UNHEALTHY


def main(argv: Sequence[str] | None = None) -> int:
    """Check, tell, strike. Returns the process's exit code."""
    args = _parse(argv)
    rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in _LAUNCHED.items())
    node = node_name()
    try:
        config = load_config(args.config, args.set)
        findings = check_node(config, node) if local_rank == 0 else []
        if world_size > 1:
            from launcher.preflight.rank_checks import (
                check_ranks,  # torch loads only where ranks or GPUs are to be tried
            )

            findings = check_ranks(node, findings)
        elif any(finding.device for finding in findings) and exit_code(findings, node) == EXIT_DONE:
            from launcher.preflight.rank_checks import check_load

            findings += check_load(node)
        code = exit_code(findings, node)
        if rank == 0 or (local_rank == 0 and code == EXIT_CRASH):  # ranks that did not meet know only of themselves
            print(as_json(findings, node), flush=True) if args.json else print_findings(findings, sys.stdout)
        strike = strike_of(findings, node, time.time())
        if strike and local_rank == 0:
            add_strike(Path(config.run_dir), strike)
        return code
    except UserError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


_LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # what a launcher tells its processes


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="preflight.py", description="Check a node before a run.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed inserts it
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
