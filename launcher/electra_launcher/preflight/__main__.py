"""Check whether this node is fit for a run and, with several ranks, compare their GPUs, clocks and network.

    srun --ntasks-per-node=1 python -m electra_launcher.preflight --config C     checks each node by itself
    deepspeed ... --module electra_launcher.preflight --config C                 also finds slow ranks among all

Exit codes:
    0    the node is fit.
    69   the node is unhealthy; a strike was added to the run's strikes.jsonl. Start the run without this node.
    78   the user must fix something: disk space, storage or the config.
    75   the run folder is full or away, so a fault could not be recorded; or the checks were interrupted (Ctrl-C).
    1    the ranks cannot work together, and no single node is at fault.

Cost: a second for one process; with GPUs 3 s of matrix products and torch's import.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.config.secrets import whole_overrides
from electra_dist.data.node_cache import choose_cache_folder
from electra_dist.engine.rank_environment import RankPlace, rank_place, whole_number
from electra_dist.errors import EXIT_CRASH, EXIT_DONE
from electra_dist.run.failures import add_strike
from electra_dist.run.heartbeat import Heartbeat
from electra_dist.run.this_node import node_name
from electra_dist.store.open_store import REMOTE_SCHEMES
from electra_dist.store.patience import Patience, WaitReporter
from electra_launcher.entry import add_options, begin_program, exit_code_of
from electra_launcher.preflight.findings import Finding, as_json, exit_code, print_findings, strike_of
from electra_launcher.preflight.gpu_checks import check_gpus
from electra_launcher.preflight.storage_checks import check_storage


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node, print the findings, add a strike to strikes.jsonl if it is unhealthy; return the exit code.

    The variables RANK, LOCAL_RANK and WORLD_SIZE decide what is checked; with a world size above 1 the call is
    collective. Local rank 0 of each node checks the node. Rank 0 prints the findings of all ranks; if the ranks cannot
    work together, local rank 0 of each node prints its own.
    """
    args = _parse(argv)
    rank = 0  # so that an error is printed if this process does not know its rank

    def program() -> int:
        nonlocal rank
        place = rank_place()
        rank = place.rank
        return _check_and_report(args, place)

    return exit_code_of(program, shows=lambda error: rank == 0)


def _check_and_report(args: argparse.Namespace, place: RankPlace) -> int:
    """Make the checks of the rank at `place`, print the findings, and record a strike (a fault of this node).

    Returns the exit code.
    """
    node = node_name()
    is_first_of_node = place.local_rank == 0
    config = _with_cache_folder(load_config(args.config, whole_overrides(args.set)), args.nodes)
    patience = Patience(args.storage_patience)
    _record_waits(patience.reporter, Path(config.run_dir), place.rank if args.first_rank is None else args.first_rank)
    findings = _check(config, node, patience, is_first_of_node=is_first_of_node, world_size=place.world_size)
    code = exit_code(findings, node)
    # If the ranks could not meet, rank 0 knows nothing of the other nodes: then each node prints its findings.
    if place.rank == 0 or (is_first_of_node and code == EXIT_CRASH):
        if args.json:
            print(as_json(findings, node), flush=True)
        else:
            print_findings(findings, sys.stdout)
    strike = strike_of(findings, node, time.time())
    if strike is not None and is_first_of_node:
        add_strike(Path(config.run_dir), strike)
    return code


def _check(config: Config, node: str, patience: Patience, *, is_first_of_node: bool, world_size: int) -> list[Finding]:
    """Check the node, if this is its first rank. Then compare all ranks; a single rank tests its GPUs under load."""
    findings = check_node(config, node, patience) if is_first_of_node else []
    if world_size > 1:
        # Imported late, because it imports torch, which a node without ranks and GPUs need not have.
        from electra_launcher.preflight.rank_comparison import check_ranks

        return check_ranks(node, findings)
    has_gpus = any(finding.device for finding in findings)
    is_fit = exit_code(findings, node) == EXIT_DONE
    if has_gpus and is_fit:
        from electra_launcher.preflight.rank_comparison import check_load

        return findings + check_load(node)
    return findings


def check_node(config: Config, node: str, patience: Patience | None = None) -> list[Finding]:
    """Check this node's GPUs, storage, disks and clock, which needs neither torch nor other nodes.

    Test objects that are written to the storage are deleted again. If storage is full or does not respond, a new run
    waits for it as long as `patience` says (None: not at all). Raises StoreError if the run has several nodes and this
    node has no folder in which it could cache shards.
    """
    return check_gpus(node) + check_storage(config, node, patience)


def _with_cache_folder(config: Config, num_nodes: int) -> Config:
    """Set `data.cache_dir` to the folder in which the ranks of this node will cache shards, if some are on S3."""
    urls = [*(corpus.url for corpus in config.data.training_corpora()), config.data.heldout or ""]
    if not any(url.startswith(REMOTE_SCHEMES) for url in urls):
        return config
    # A launcher of ranks sets WORLD_SIZE, Slurm sets SLURM_NNODES; a supervisor without Slurm passes `num_nodes`.
    has_several_nodes = num_nodes > 1 or rank_place().has_several_nodes or whole_number("SLURM_NNODES", 1) > 1
    folder = choose_cache_folder(config.data.cache_dir, config.cache_folder, has_several_nodes=has_several_nodes)
    data = config.data.model_copy(update={"cache_dir": str(folder.path)})
    return config.model_copy(update={"data": data})


def _record_waits(wait_reporter: WaitReporter, run_dir: Path, rank: int) -> None:
    """Write each wait for storage to the heartbeat file of `rank`, for `electra-dist status`."""
    heartbeats: list[Heartbeat] = []  # the writer of the heartbeat file; empty before the first wait

    def record(reason: str) -> None:
        if reason and not heartbeats:
            heartbeats.append(Heartbeat(run_dir, rank))
        if heartbeats:
            heartbeats[0].beat("storage" if reason else "setup", 0, reason)

    wait_reporter.on_wait = record


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line `argv` of preflight; None stands for that of this process."""
    parser = argparse.ArgumentParser(
        prog="electra_launcher.preflight",
        description="Check whether this node is fit for a run. Exit codes: 0 fit; 69 unhealthy, start without this "
        "node; 78 fix the disk, the storage or the config; 1 the ranks cannot work together.",
    )
    add_options(parser, "--config", "--set")
    parser.add_argument(
        "--storage-patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for storage that is full or away, if the run has not begun (default: 0)",
    )
    parser.add_argument(
        "--first-rank",
        type=int,
        metavar="RANK",
        help="number of this node's first rank; waits for storage are recorded in its heartbeat file "
        "(default: the variable RANK, or 0)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="number of nodes of the run, which decides where shards are cached (default: as Slurm or the launcher "
        "of the ranks says)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed inserts it
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin_program()
    sys.exit(main())
