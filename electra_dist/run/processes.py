"""Name this node, find the processes of a run on it, and tell a process from a later one with the same number.

The processes of a run are found by an environment variable that their supervisor sets.

Limits: Linux only, because it reads /proc. Processes of another pid namespace, hence of another container, are not
visible.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "ELECTRA_DIST_SUPERVISED"  # environment variable that a supervisor sets for all processes that it starts

_START_FIELD = 19  # of /proc/PID/stat, counted from the field after the command's name, which stands in parentheses


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name: Slurm's name, which `sbatch --exclude` understands, or the host name without Slurm."""
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return os.fsencode(name).decode(errors="replace")  # The kernel accepts host names of any bytes.


def mark_of(run_dir: Path, node: int) -> str:
    """Return the text, such as "/runs/large#0", by which all processes of a run on a node are found.

    A supervisor passes it in the variable `MARK` to all processes that it starts. They keep it if the supervisor dies.
    """
    return f"{Path(run_dir).absolute()}#{node}"


def marked_pids(mark: str) -> list[int]:
    """Return the ids of this user's living processes whose variable `MARK` is `mark`, except the calling process."""
    entry = f"{MARK}={mark}".encode()
    pids = []
    for process_folder in Path("/proc").glob("[0-9]*"):
        pid = int(process_folder.name)
        with contextlib.suppress(OSError):  # The process has ended, or is another user's.
            # /proc/PID/environ holds NAME=VALUE entries that end with a NUL byte.
            entries = (process_folder / "environ").read_bytes().split(b"\0")
            if entry in entries and pid != os.getpid():
                pids.append(pid)
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie (dead, but not yet collected by its parent)."""
    state = status_field(pid, "State")[:1]  # the first letter of, for example, "S (sleeping)"
    return state not in ("", "Z", "X")


def status_field(pid: int, name: str) -> str:
    """Return a field of /proc/PID/status, such as "S (sleeping)" for "State"; "" if process or field is missing."""
    with contextlib.suppress(OSError):
        # The name of a process may hold any byte; the kernel escapes line feeds in it, and no other line break.
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):
            if line.startswith(f"{name}:".encode()):
                return line.partition(b":")[2].strip().decode(errors="replace")
    return ""


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Identity of a process: boot and start time distinguish it from a later process with the same id."""

    pid: int
    start: int  # clock ticks from the boot to the start of the process; 0 if unknown
    pid_namespace: str  # such as "pid:[4026531836]"; each container has one
    boot_id: str  # random; the kernel chooses it when the machine boots; "" if unknown


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> ProcessIdentity:
    """Return the identity of the process `pid` of this container; `start` is 0 if there is no such process."""
    return ProcessIdentity(pid=pid, start=_start_of(pid), pid_namespace=_pid_namespace(), boot_id=boot_id())


def is_running(process: ProcessIdentity) -> bool | None:
    """Return whether a process exists and is no zombie; None if the calling process cannot see that.

    A process of another machine, boot or container cannot be seen, nor one whose boot or container is unknown.
    """
    is_of_this_boot = process.boot_id != "" and process.boot_id == boot_id()
    is_visible = is_of_this_boot and process.pid_namespace != "" and process.pid_namespace == _pid_namespace()
    if not is_visible:
        return None
    return is_alive(process.pid) and _start_of(process.pid) == process.start


def _start_of(pid: int) -> int:
    """Return the clock ticks from the boot to the start of a process; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, _, fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")  # A name may hold any byte.
        return int(fields.split()[_START_FIELD])
    return 0


def _pid_namespace() -> str:
    """Return the name of this process's pid namespace; "" if the system does not give it."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def boot_id() -> str:
    """Return the kernel's random id of this boot, which all containers of a machine share; "" if it is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
