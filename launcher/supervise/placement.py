"""Which ranks run on which node, and the DeepSpeed command that starts this node's: pure but for what it looks up.

Every node is told its own number and starts its own ranks (`deepspeed --no_ssh --node_rank K`): no ssh, no pdsh, no
MPI. The names of a host file only count; they need not resolve.
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
    """This node's place among the nodes of a run."""

    node: int
    slots: tuple[int, ...]  # ranks on each node
    address: str = "127.0.0.1"  # of node 0
    port: int | None = None  # first port; None: any free one

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
        """What the command line says; what it leaves open is looked up on this node.

        Raises:
            UserError: the options contradict each other, or name too little.
        """
        if hostfile is not None:
            slots = _slots(hostfile)
            if nodes not in (None, len(slots)):
                raise UserError(f"--nodes {nodes}, but {hostfile} names {len(slots)}; leave one of them out")
        else:
            slots = (ranks_per_node or local_devices(),) * (nodes or 1)
        if not 0 <= node < len(slots):
            raise UserError(f"--node-rank {node} of {len(slots)} nodes; the first is 0")
        if len(slots) > 1 and not address:
            raise UserError("several nodes need --master-addr, the address of node 0")
        if len(slots) > 1 and port is None:
            port = _DEFAULT_PORT
        return cls(node=node, slots=slots, address=address or "127.0.0.1", port=port)

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        return len(self.slots)

    @property
    def ranks(self) -> range:
        """The ranks on this node."""
        first = sum(self.slots[: self.node])
        return range(first, first + self.slots[self.node])

    def missing(self, *found: Iterable[int]) -> set[int]:
        """The ranks of this node that are in none of these."""
        return set(self.ranks).difference(*found)

    @property
    def names(self) -> str:
        """The ranks on this node, for a person."""
        return f"{self.ranks[0]} to {self.ranks[-1]} of {sum(self.slots)}"

    def command(self, state: Path, port: int, arguments: Sequence[str]) -> list[str]:
        """What starts this node's ranks; `state` is a folder of this start, `arguments` are pretrain.py's."""
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
        if self.num_nodes > 1:
            hostfile = state / "hostfile"
            hostfile.write_text("".join(f"node-{i} slots={count}\n" for i, count in enumerate(self.slots)))
            command += ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(self.node)]
            command += ["--master_addr", self.address]
        elif not os.environ.get("CUDA_VISIBLE_DEVICES"):  # which deepspeed heeds only without --num_gpus
            command += ["--num_gpus", str(self.slots[0])]
        return [*command, "--module", "launcher.supervise.rank_main", "--state", str(state), *arguments]


def local_devices() -> int:
    """GPUs that this process may use, without asking a driver; 1 where there are none."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    return max(1, sum(bool(re.fullmatch(r"nvidia\d+", file.name)) for file in Path("/dev").glob("nvidia*")))


def _slots(hostfile: Path) -> tuple[int, ...]:
    try:
        lines = [line.partition("#")[0].split() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        raise UserError(f"--hostfile {hostfile}: {error.strerror}; write one line `HOST slots=N` a node") from None
    slots = []
    for line in filter(None, lines):
        match = re.fullmatch(r"slots=([1-9]\d*)", line[-1])
        if len(line) != 2 or match is None:
            raise UserError(f"--hostfile {hostfile}: {' '.join(line)!r} is not of the form `HOST slots=N`; mend it")
        slots.append(int(match[1]))
    if not slots:
        raise UserError(f"--hostfile {hostfile} names no host; write one line `HOST slots=N` a node")
    return tuple(slots)
