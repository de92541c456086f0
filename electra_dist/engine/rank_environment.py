"""Read and check the environment variables by which a launcher tells a process its rank.

    RANK, WORLD_SIZE                  number of this rank, and of all ranks; a single rank without them
    LOCAL_RANK                        number of this rank among those of its node; 0 without it
    LOCAL_SIZE or LOCAL_WORLD_SIZE    ranks on this node (DeepSpeed's launcher or torchrun sets it); 1 without them
    MASTER_ADDR, MASTER_PORT          where the ranks meet: host name or address, and TCP port of rank 0
    DS_ACCELERATOR                    device that DeepSpeed is to use

Guarantee: a value that is no number or contradicts another value gives an error of one line. Otherwise the rank would
end in a traceback, or wait for ranks that do not exist.

Rank 0 listens at MASTER_PORT. `deepspeed` names 29500 unless the user names another port, so a second run on the same
node needs `--master_port`. The supervisor chooses a free port for each start. No file says where the ranks meet,
because another user could write it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from electra_dist.errors import UserError

PREFLIGHT_LIMIT_S = 600.0  # how long preflight may check a node before its ranks join the process group
_NUMBER = re.compile(r"[0-9]{1,9}")
_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Number of this rank in the run and on its node, and how many ranks the run and the node have."""

    rank: int
    world_size: int
    local_rank: int
    ranks_on_node: int

    @property
    def has_several_nodes(self) -> bool:
        """Return whether the run has ranks on other nodes, too."""
        return self.world_size > self.ranks_on_node


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace:
    """Read this rank's numbers from the launcher's variables; raise UserError if these are wrong or contradictory."""
    world_size = whole_number("WORLD_SIZE", 1, environment)
    rank = whole_number("RANK", 0, environment)
    local_rank = whole_number("LOCAL_RANK", 0, environment)
    size_variable = "LOCAL_SIZE" if "LOCAL_SIZE" in environment else "LOCAL_WORLD_SIZE"
    ranks_on_node = whole_number(size_variable, 1, environment)
    port = whole_number("MASTER_PORT", 0, environment)
    if not rank < world_size:
        raise _refused(f"RANK is {rank}, but WORLD_SIZE is {world_size}, so the ranks have the numbers below it")
    if not 1 <= ranks_on_node <= world_size:
        raise _refused(f"{size_variable} is {ranks_on_node}, but WORLD_SIZE is {world_size}")
    if size_variable in environment and not local_rank < ranks_on_node:
        raise _refused(f"LOCAL_RANK is {local_rank}, but {size_variable} is {ranks_on_node}")
    if port > 65535 or (world_size > 1 and environment.get("MASTER_PORT") is not None and port == 0):
        raise _refused(f"MASTER_PORT is {port}, which is no TCP port that several ranks can name")
    check_device(environment)
    return RankPlace(rank=rank, world_size=world_size, local_rank=local_rank, ranks_on_node=ranks_on_node)


def check_device(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if DS_ACCELERATOR names a device for DeepSpeed other than "cuda" or "cpu"."""
    device = environment.get("DS_ACCELERATOR", "")
    if device and device not in _DEVICES:
        raise UserError(
            f"environment: DS_ACCELERATOR is {device[:80]!r}; set it to {' or '.join(_DEVICES)}, or unset it, and "
            f"DeepSpeed takes the GPUs if there are any"
        )


def whole_number(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number in a variable, 0 to 999999999, or `default` if it is unset; UserError for any other text."""
    text = environment.get(name)
    if text is None:
        return default
    if _NUMBER.fullmatch(text.strip()) is None:
        raise _refused(f"{name} is {text[:80]!r}, which is not a whole number from 0 to 999999999")
    return int(text)


def check_meeting(host: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if there are several ranks but no variable RANK, or if no machine has the name `host`.

    `host` is the value of MASTER_ADDR: the machine at which the ranks meet.
    """
    world_size = whole_number("WORLD_SIZE", 1, environment)
    if world_size > 1 and "RANK" not in environment:
        raise _refused(f"WORLD_SIZE is {world_size}, but RANK is not set")
    if not host:
        raise _refused("MASTER_ADDR is empty")
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:  # not if a name server does not answer, because torch tries again
            raise _refused(f"MASTER_ADDR is {host!r}, and there is no machine of this name") from None
    except UnicodeError:
        raise _refused(f"MASTER_ADDR is {host[:80]!r}, which cannot be the name of a machine") from None


def check_port(port: int) -> None:
    """Raise UserError if rank 0 cannot listen on this port, because it is in use; 0 stands for any free port."""
    if not is_free(port):
        raise UserError(
            f"port {port}, at which the ranks of this run would meet, is in use on this node; start the run with "
            f"another port: deepspeed --master_port PORT ..."
        )


def is_free(port: int) -> bool:
    """Return whether a server can now listen on this TCP port, at all addresses of this host."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=is_dual):
            return True
    except OSError:
        return False


def _refused(fault: str) -> UserError:
    return UserError(
        f"environment: {fault}; start the run by deepspeed, by electra_launcher.supervise or by electra-dist submit, "
        f"which set the variables of the ranks, or unset them for a run on a single rank"
    )
