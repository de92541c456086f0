"""Assign ranks to nodes, and build the DeepSpeed command that starts the ranks of this node.

Every node starts its own ranks (`deepspeed --no_ssh --node_rank K`), so neither ssh nor pdsh nor MPI is needed. Each
line `HOST slots=N` of a host file stands for a node with N ranks. The host names are not used, so they need not
resolve.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.gpu_cores import VISIBLE_DEVICES, visible_devices
from electra_dist.store.regular_files import read_regular

NUM_PORTS = 64  # consecutive starts of the ranks use the ports in turn
_DEFAULT_PORT = 29500
_LAST_FIRST_PORT = 65536 - NUM_PORTS


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Number of ranks on each node, number of this node, and address at which all ranks connect to each other."""

    node: int  # number of this node, from 0
    slots: tuple[int, ...]  # number of ranks on each node
    address: str = "127.0.0.1"  # host name or address of node 0, where the ranks connect to each other first
    port: int | None = None  # first of 64 ports on node 0; each start of the ranks uses the next one; None: any free

    @classmethod
    def from_options(
        cls,
        *,
        nodes: int | None,
        node: int,
        ranks_per_node: int | None,
        address: str | None,
        port: int | None,
        hostfile: Path | None,
    ) -> Placement:
        """Build the placement from command-line options; UserError if they are wrong or contradict each other.

        With a `hostfile`, each line of the file names a node and the node's number of ranks. Otherwise there are
        `nodes` nodes (None: one), each with `ranks_per_node` ranks (None: one per visible GPU, at least one). A `port`
        of None means 29500 with several nodes, any free port with one. Several nodes also need an `address`.
        """
        if hostfile is None:
            slots = _equal_slots(nodes, ranks_per_node)
        else:
            slots = _slots(hostfile)
            if nodes not in (None, len(slots)):
                raise UserError(
                    f"--nodes is {nodes}, but --hostfile {hostfile} names {len(slots)} nodes; leave out --nodes"
                )
        num_nodes = len(slots)
        if min(slots, default=0) < 1:
            raise UserError("--nodes and --gpus-per-node must be at least 1; correct the option")
        if port is not None and not 0 < port <= _LAST_FIRST_PORT:
            raise UserError(
                f"--master-port {port} is not the first of {NUM_PORTS} TCP ports; set it to a number from 1 to "
                f"{_LAST_FIRST_PORT}"
            )
        if not 0 <= node < num_nodes:
            raise UserError(
                f"--node-rank {node} is not the number of one of the {num_nodes} nodes; "
                f"set --node-rank to a number from 0 to {num_nodes - 1}"
            )
        if num_nodes > 1 and not address:
            raise UserError(
                f"--master-addr is missing for {num_nodes} nodes; set it to the host name or address of node 0"
            )
        if num_nodes > 1 and port is None:
            port = _DEFAULT_PORT  # All nodes must know the port, so it cannot be any free one.
        return cls(node=node, slots=slots, address=address or "127.0.0.1", port=port)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of the run."""
        return len(self.slots)

    @property
    def ranks(self) -> range:
        """Return the numbers of the ranks on this node, for example 8 to 15 on node 1 of 2 nodes with 8 ranks each."""
        first_rank = sum(self.slots[: self.node])  # the number of ranks on the nodes before this one
        num_ranks = self.slots[self.node]
        return range(first_rank, first_rank + num_ranks)

    def missing(self, *found: Iterable[int]) -> set[int]:
        """Return those ranks of this node that appear in none of the given collections of ranks."""
        return set(self.ranks).difference(*found)

    @property
    def names(self) -> str:
        """Return the ranks on this node as text for the log, for example "8 to 15 of 16"."""
        return f"{self.ranks[0]} to {self.ranks[-1]} of {sum(self.slots)}"

    def command(self, state: Path, port: int, arguments: Sequence[str]) -> list[str]:
        """Return the DeepSpeed command that starts this node's ranks, which run launcher/pretrain.py with `arguments`.

        The ranks of all nodes connect to `port` on node 0; pass a new port each time the ranks are started. With
        several nodes or CUDA_VISIBLE_DEVICES set, this writes a host file for DeepSpeed into the folder `state`.
        """
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
        shown = os.environ.get(VISIBLE_DEVICES)
        # With CUDA_VISIBLE_DEVICES and no host file, DeepSpeed takes the variable for a list of numbers. It sets the
        # variable to 0, 1, ... for the ranks, which therefore get its value as an argument.
        if self.num_nodes > 1 or shown is not None:
            # With --no_ssh DeepSpeed connects to no host: it needs one line per node, but not the real host names.
            lines = [f"node-{node} slots={num_ranks}\n" for node, num_ranks in enumerate(self.slots)]
            hostfile = state / "hostfile"
            hostfile.write_text("".join(lines), "ascii")
            command += ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(self.node)]
            command += ["--master_addr", self.address]
        else:
            command += ["--num_gpus", str(self.slots[0])]
        command += ["--module", "launcher.supervise.rank_main", "--state", str(state)]
        if shown is not None:
            command.append(f"--visible-devices={shown}")
        return [*command, *arguments]


def local_devices(root: Path = Path("/")) -> int:
    """Return the number of visible GPUs, at least 1. The GPU driver is not used, because a faulty one can hang."""
    return max(1, len(visible_devices(os.environ, root)))


def _equal_slots(nodes: int | None, ranks_per_node: int | None) -> tuple[int, ...]:
    num_nodes = nodes or 1
    num_ranks = ranks_per_node or local_devices()
    return (num_ranks,) * num_nodes


def _slots(hostfile: Path) -> tuple[int, ...]:
    """Return the number of ranks on each node, from the lines `HOST slots=N` of a DeepSpeed host file."""
    try:
        text = read_regular(hostfile).decode(errors="replace")
    except OSError as error:
        raise UserError(
            f"--hostfile {hostfile}: {error.strerror}; name a file with one line `HOST slots=N` per node"
        ) from None
    slots = []
    for line in text.splitlines():
        line_without_comment = line.partition("#")[0]
        words = line_without_comment.split()
        if not words:
            continue
        slots_field = re.fullmatch(r"slots=([1-9][0-9]{0,5})", words[-1])
        if len(words) != 2 or slots_field is None:
            raise UserError(
                f"--hostfile {hostfile}: {' '.join(words)!r} is not of the form `HOST slots=N`; correct this line"
            )
        slots.append(int(slots_field[1]))
    if not slots:
        raise UserError(f"--hostfile {hostfile} names no host; write one line `HOST slots=N` per node")
    return tuple(slots)
