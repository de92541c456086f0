"""Assign ranks to nodes, and build the DeepSpeed command that starts the ranks of this node.

Every node starts its own ranks (`deepspeed --no_ssh --node_rank K`), so neither ssh nor pdsh nor MPI is needed. From
a host file only the number of lines and their slots are used; the host names need not resolve.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import UserError

_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Assignment of ranks to nodes, seen from one node: ranks are numbered node by node, from node 0 on."""

    node: int  # number of this node, from 0
    slots: tuple[int, ...]  # number of ranks on each node
    address: str = "127.0.0.1"  # of node 0
    port: int | None = None  # first of the ports that starts use in turn; None: any free one

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
        """Build the placement from command-line options; an option that is None is looked up or gets a default.

        Args:
            nodes: number of nodes; None means the lines of `hostfile`, or 1 without one.
            node: number of this node, from 0.
            ranks_per_node: ranks on each node, ignored with `hostfile`; None means `local_devices()`.
            address: address of node 0; required with several nodes.
            port: first port; None means 29500 with several nodes and any free port with one.
            hostfile: DeepSpeed host file, which may give each node a different number of ranks.

        Raises:
            UserError: the options contradict each other, or with several nodes the address is missing.
        """
        if hostfile is not None:
            slots = _slots(hostfile)
            if nodes not in (None, len(slots)):
                raise UserError(
                    f"--nodes is {nodes}, but --hostfile {hostfile} names {len(slots)} nodes; leave out --nodes"
                )
        else:
            slots = (ranks_per_node or local_devices(),) * (nodes or 1)
        if not 0 <= node < len(slots):
            raise UserError(
                f"--node-rank {node} is not the number of one of the {len(slots)} nodes; "
                f"set --node-rank to a number from 0 to {len(slots) - 1}"
            )
        if len(slots) > 1 and not address:
            raise UserError(
                f"--master-addr is missing for {len(slots)} nodes; set it to the host name or address of node 0"
            )
        if len(slots) > 1 and port is None:
            port = _DEFAULT_PORT
        return cls(node=node, slots=slots, address=address or "127.0.0.1", port=port)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of the run."""
        return len(self.slots)

    @property
    def ranks(self) -> range:
        """Return the ranks on this node, which are consecutive."""
        first = sum(self.slots[: self.node])
        return range(first, first + self.slots[self.node])

    def missing(self, *found: Iterable[int]) -> set[int]:
        """Return the ranks of this node that are in none of the given collections of ranks."""
        return set(self.ranks).difference(*found)

    @property
    def names(self) -> str:
        """Return the ranks on this node as text for the log, for example "8 to 15 of 16"."""
        return f"{self.ranks[0]} to {self.ranks[-1]} of {sum(self.slots)}"

    def command(self, state: Path, port: int, arguments: Sequence[str]) -> list[str]:
        """Return the DeepSpeed command that starts this node's ranks. With several nodes, also write a host file.

        With one node and CUDA_VISIBLE_DEVICES set, `--num_gpus` is left out: DeepSpeed would then ignore the variable.

        Args:
            state: folder of this start, which exists; the ranks write their pids and exit codes into it.
            port: port of the rendezvous of torch.distributed on node 0; a new one for each start.
            arguments: command-line arguments of launcher/pretrain.py.
        """
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
        if self.num_nodes > 1:
            hostfile = state / "hostfile"
            hostfile.write_text("".join(f"node-{node} slots={count}\n" for node, count in enumerate(self.slots)))
            command += ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(self.node)]
            command += ["--master_addr", self.address]
        elif not os.environ.get("CUDA_VISIBLE_DEVICES"):
            command += ["--num_gpus", str(self.slots[0])]
        return [*command, "--module", "launcher.supervise.rank_main", "--state", str(state), *arguments]


def local_devices() -> int:
    """Return the number of GPUs that this process may use, or 1 without a GPU (one CPU rank).

    Counts the entries of CUDA_VISIBLE_DEVICES or the files /dev/nvidia0, /dev/nvidia1, ..., because a query of a
    faulty driver can hang. The counted GPUs need not work.
    """
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    device_files = [file for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name)]
    return max(1, len(device_files))


def _slots(hostfile: Path) -> tuple[int, ...]:
    """Return the number of ranks on each node from a DeepSpeed host file; comments and empty lines do not count.

    Raises:
        UserError: the file cannot be read, names no host, or has a line that is not `HOST slots=N` with N >= 1.
    """
    try:
        lines = [line.partition("#")[0].split() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        raise UserError(
            f"--hostfile {hostfile}: {error.strerror}; name a file with one line `HOST slots=N` per node"
        ) from None
    slots = []
    for words in filter(None, lines):
        match = re.fullmatch(r"slots=([1-9]\d*)", words[-1])
        if len(words) != 2 or match is None:
            raise UserError(
                f"--hostfile {hostfile}: {' '.join(words)!r} is not of the form `HOST slots=N`; correct this line"
            )
        slots.append(int(match[1]))
    if not slots:
        raise UserError(f"--hostfile {hostfile} names no host; write one line `HOST slots=N` per node")
    return tuple(slots)
