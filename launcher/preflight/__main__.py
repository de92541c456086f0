"""Check whether this node is fit for a run; with several ranks, also their network.

    srun --ntasks-per-node=1 python -m launcher.preflight --config C     each node by itself
    deepspeed ... --module launcher.preflight --config C                 all ranks together: who is slow

Exit 0: go; 69: this node is unhealthy, a strike was added to the run's list, go without it; 78: something that only
the user can fix (disk, storage, config); 1: the ranks cannot work together and no node is at fault.

Cost: a second for one process; with GPUs 3 s of matrix products and torch's import.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_USER_ERROR, UserError
from electra_dist.run.strikes import add_strike, node_name
from launcher.preflight.findings import as_json, exit_code, print_findings, strike_of
from launcher.preflight.node_check import check_node


def main(argv: Sequence[str] | None = None) -> int:
    """Check, tell, strike. Returns the process's exit code."""
    args = _parse(argv)
    rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in _LAUNCHED.items())
    node = node_name()
    try:
        config = load_config(args.config, args.set)
        findings = check_node(config, node) if local_rank == 0 else []
        if world_size > 1:
            # Imported here: torch loads only where ranks or GPUs are to be tried.
            from launcher.preflight.rank_checks import check_ranks

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
    parser = argparse.ArgumentParser(prog="launcher.preflight", description="Check a node before a run.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed inserts it
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
