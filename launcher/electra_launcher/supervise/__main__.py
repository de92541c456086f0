"""Supervise the ranks of a run on one node: start, watch and restart them, and end with a documented exit code.

One machine:

    python -m electra_launcher.supervise --config C

Two nodes; run this on each, with K = 0 on the node whose address is H and K = 1 on the other:

    python -m electra_launcher.supervise --config C --nodes 2 --node-rank K --master-addr H
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from electra_dist.config.secrets import hide_overrides
from electra_dist.engine.rank_environment import check_device
from electra_dist.errors import EXIT_DONE
from electra_launcher.entry import add_options, begin_program, exit_code_of, read_config
from electra_launcher.supervise.rank_processes import Placement
from electra_launcher.supervise.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise this node's ranks until the run ends here, and return an exit code of `electra_dist/errors.py`.

    Blocks for as long as the run takes. A `UserError` (wrong option or config, a run folder that cannot be written or
    in which another start trains) is printed to stderr as one line and returned as exit code 78.
    """
    args = _parse(argv)
    # Ctrl-C comes before the supervisor handles signals, or while it waits for the run folder.
    return exit_code_of(lambda: _supervise(args), interrupted="interrupted; no rank was started")


def _supervise(args: argparse.Namespace) -> int:
    """Check this node if `--preflight` was given, then supervise its ranks; return the exit code."""
    check_device()
    # Each rank, and preflight, loads the same config file with the same overrides.
    pretrain_arguments = ["--config", args.config]
    for override in hide_overrides(args.set):
        pretrain_arguments += ["--set", override]
    rank_options = ["--accept-new-numerics"] if args.accept_new_numerics else []
    config, _ = read_config(args.config, args.set)
    placement = Placement.from_options(
        nodes=args.nodes,
        node=args.node_rank,
        ranks_per_node=args.gpus_per_node,
        address=args.master_addr,
        port=args.master_port,
    )
    supervisor = Supervisor(config, placement, pretrain_arguments, args.session, rank_options)
    with contextlib.closing(supervisor):
        if args.preflight:
            preflight_code = supervisor.check()
            if preflight_code != EXIT_DONE:
                return preflight_code
        return supervisor.run()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line `argv` of a supervisor; None stands for that of this process."""
    parser = argparse.ArgumentParser(
        prog="electra_launcher.supervise",
        description="Start, watch and restart the ranks of a run on this node. Run one supervisor on each node.",
    )
    add_options(parser, "--config", "--set", "--accept-new-numerics")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes of the job (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node, from 0 (default: 0)")
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        help="ranks to start on each node (default: the number of visible GPUs, or 1 without a GPU)",
    )
    parser.add_argument("--master-addr", help="host name or address of node 0; required with more than one node")
    parser.add_argument(
        "--master-port",
        type=int,
        help="first of 64 consecutive ports on node 0 (default: 29500; with one node, any free port)",
    )
    parser.add_argument(
        "--session",
        default="",
        help="identifier of the job: equal on all its nodes, different for every job (the batch script sets it)",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="check this node with electra_launcher.preflight before the first start",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin_program()
    sys.exit(main())
