"""Supervise one node's ranks: start, watch and restart them; end with a known exit code.

python -m launcher.supervise --config C                                            one machine
python -m launcher.supervise --config C --nodes 2 --node-rank K --master-addr H    the same on each of two
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_USER_ERROR, UserError
from launcher.supervise.placement import Placement
from launcher.supervise.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise this node's part of a run. Returns the process's exit code."""
    args = _parse(argv)
    arguments = ["--config", args.config, *(part for override in args.set for part in ("--set", override))]
    try:
        config = load_config(args.config, args.set)
        placement = Placement.from_options(
            nodes=args.nodes,
            node=args.node_rank,
            ranks_per_node=args.gpus_per_node,
            address=args.master_addr,
            port=args.master_port,
            hostfile=args.hostfile,
        )
        supervisor = Supervisor(config, placement, arguments, args.session)
        return (args.preflight and supervisor.check()) or supervisor.run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launcher.supervise", description="Start, watch and restart one node's ranks."
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    parser.add_argument("--nodes", type=int, help="nodes of the job; default: those of --hostfile, else 1")
    parser.add_argument("--node-rank", type=int, default=0, help="this node's number, from 0")
    parser.add_argument("--gpus-per-node", type=int, help="ranks per node; default: the GPUs here, else 1")
    parser.add_argument("--master-addr", help="address of node 0; needed with several nodes")
    parser.add_argument("--master-port", type=int, help="first of 64 ports; default: 29500, alone: any free one")
    parser.add_argument("--session", default="", help="the same word on all nodes, another in each job")
    parser.add_argument("--preflight", action="store_true", help="check this node first (launcher.preflight)")
    parser.add_argument("--hostfile", type=Path, help="DeepSpeed's: HOST slots=N a line; default: as the options say")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
