"""Find a free port at which the ranks of one node meet, if the port that their launcher named is in use.

`deepspeed` passes port 29500 to all ranks unless the user names another one. A second run on the same node would
therefore end with the error of torch.distributed.

How: rank 0 tries the port. If it is in use, it takes the next free one. Ranks of one node have the same parent
process, the launcher, so rank 0 writes the port to a file in the temporary folder, and the other ranks read it there.
The name of the file has the launcher's process id and the port that the launcher has proposed (MASTER_PORT). The file
is deleted when all ranks have met.

Limits: only for the ranks of a single node that DeepSpeed's launcher started. With several nodes the launcher's port
stays; the supervisor gives each of its starts another one. Another process may take the port between its trial and its
use, which ends the start with an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import replacing

PREFLIGHT_LIMIT_S = 600.0  # how long preflight may check a node before its ranks join the process group
_MOST_TRIALS = 64  # ports that rank 0 tries, from the launcher's one on
_PATIENCE_S = 120.0  # how long a rank waits for the file of rank 0; then it uses the launcher's port
_POLL_S = 0.02


@contextlib.contextmanager
def agreed_port() -> Iterator[None]:
    """Set MASTER_PORT to the same free port on all ranks of the node, before the `with` block joins them to a group.

    Does nothing for ranks that run on several nodes or were started in another way than by DeepSpeed's launcher.

    Raises:
        UserError: rank 0 found no free port.
    """
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None or os.environ.get("LOCAL_SIZE") != world_size:
        yield
        return
    port_file = _port_file()
    if os.environ["RANK"] != "0":
        port = _read_port(port_file)
        if port:
            os.environ["MASTER_PORT"] = port
        yield
        return
    port = str(free_port_from(int(os.environ["MASTER_PORT"])))
    os.environ["MASTER_PORT"] = port
    with replacing(port_file) as file:
        file.write(port.encode())
    try:
        yield
    finally:
        port_file.unlink(missing_ok=True)


def free_port_from(first: int) -> int:
    """Return the first free TCP port of this host that is not below `first`.

    Args:
        first: port to try first, and 63 more after it. 0 is returned as it is: the kernel then chooses a port.

    Raises:
        UserError: none of these ports is free.
    """
    if first == 0:
        return first
    for port in range(first, min(first + _MOST_TRIALS, 65536)):
        if is_free(port):
            return port
    raise UserError(
        f"MASTER_PORT {first} and the {_MOST_TRIALS - 1} ports after it are in use on this node; start the run with "
        f"another port: deepspeed --master_port PORT ..."
    )


def is_free(port: int) -> bool:
    """Return whether a server can listen on a TCP port of all addresses of this host now."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=is_dual):
            return True
    except OSError:
        return False


def _port_file() -> Path:
    """Return the path of the file through which rank 0 passes the port to the other ranks of this node.

    The name has the user's id, the process id of the launcher, which is the parent of all ranks, its start time, and
    the port that it has proposed (MASTER_PORT). The start time distinguishes the launcher from an earlier process with
    the same id. The port distinguishes two runs that one process has launched.
    """
    parent = psutil.Process(os.getppid())
    port = os.environ.get("MASTER_PORT", "")
    name = f"electra-dist-port-{os.getuid()}-{parent.pid}-{parent.create_time():.2f}-{port}"
    return Path(tempfile.gettempdir()) / name


def _read_port(port_file: Path) -> str:
    """Return the port that rank 0 has written, waiting for the file; "" if it does not appear."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return port_file.read_text(encoding="ascii")
        time.sleep(_POLL_S)
    return ""
