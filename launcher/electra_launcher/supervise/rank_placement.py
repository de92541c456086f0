"""Say which ranks of a run are on this node, and by which variables they learn their places."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.gpu_affinity import VISIBLE_DEVICES, num_gpus, visible_devices

NUM_PORTS = 64  # consecutive starts of the ranks use the ports in turn
_DEFAULT_PORT = 29500
_LAST_FIRST_PORT = 65536 - NUM_PORTS


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Place of one node's ranks in a run: the node's number, the numbers of nodes and ranks, and where all meet."""

    node: int  # number of this node, from 0
    num_nodes: int
    ranks_per_node: int
    address: str = "127.0.0.1"  # host name or address of node 0, where the ranks connect to each other first
    port: int | None = None  # first of 64 ports on node 0; each start of the ranks uses the next one; None: any free

    @classmethod
    def from_options(
        cls, *, nodes: int, node: int, ranks_per_node: int | None, address: str | None, port: int | None
    ) -> Placement:
        """Build the placement from command-line options; raise UserError if they are wrong or contradict each other.

        `ranks_per_node` None means one rank per visible GPU, at least one. A `port` of None means 29500 with several
        nodes, any free port with one. Several nodes also need an `address`.
        """
        num_ranks = local_devices() if ranks_per_node is None else ranks_per_node
        if min(nodes, num_ranks) < 1:
            raise UserError("--nodes and --gpus-per-node must be at least 1; correct the option")
        if port is not None and not 0 < port <= _LAST_FIRST_PORT:
            raise UserError(
                f"--master-port {port} is not the first of {NUM_PORTS} TCP ports; set it to a number from 1 to "
                f"{_LAST_FIRST_PORT}"
            )
        if not 0 <= node < nodes:
            raise UserError(
                f"--node-rank {node} is not the number of one of the {nodes} nodes; "
                f"set --node-rank to a number from 0 to {nodes - 1}"
            )
        if nodes > 1 and not address:
            raise UserError(
                f"--master-addr is missing for {nodes} nodes; set it to the host name or address of node 0"
            )
        if nodes > 1 and port is None:
            port = _DEFAULT_PORT  # All nodes must know the port, so it cannot be any free one.
        return cls(node=node, num_nodes=nodes, ranks_per_node=num_ranks, address=address or "127.0.0.1", port=port)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the run, on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks(self) -> range:
        """Return the numbers of the ranks on this node, for example 8 to 15 on node 1 of 2 nodes with 8 ranks each."""
        first_rank = self.node * self.ranks_per_node
        return range(first_rank, first_rank + self.ranks_per_node)

    @property
    def names(self) -> str:
        """Return the ranks on this node as text for the log, for example "8 to 15 of 16"."""
        return f"{self.ranks[0]} to {self.ranks[-1]} of {self.num_ranks}"

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Return the environment variables that tell a rank its place; all ranks meet at `port` on node 0.

        Torch, DeepSpeed and `electra_dist/engine/rank_environment.py` read them; DeepSpeed's launcher sets the same.
        If nothing says which GPUs of this node are the run's, they are the first ones, one for each rank.
        """
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks[0]),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
        }
        if VISIBLE_DEVICES not in os.environ and num_gpus() > self.ranks_per_node:
            # Otherwise the power and the faults of GPUs of other runs would count as this run's.
            variables[VISIBLE_DEVICES] = ",".join(str(number) for number in range(self.ranks_per_node))
        return variables


def local_devices(root: Path = Path("/")) -> int:
    """Return the number of GPUs that CUDA would show, at least 1, without the driver: a faulty one can hang."""
    return max(1, len(visible_devices(os.environ, root)))
