"""Name a process so that it cannot be mistaken for a later one with the same number, and find out whether it lives.

Limits: Linux only, because it reads /proc. Processes of another pid namespace, hence of another container, are not
visible.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from electra_dist.run.marked_processes import is_alive

_START_FIELD = 19  # of /proc/PID/stat, counted from the field after the command's name, which stands in parentheses


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
    return ProcessIdentity(pid=pid, start=_start_of(pid), pid_namespace=_pid_namespace(), boot_id=_boot_id())


def is_running(process: ProcessIdentity) -> bool | None:
    """Return whether a process exists and is no zombie; None if the calling process cannot see that.

    A process of another machine, boot or container cannot be seen, nor one whose boot or container is unknown.
    """
    is_of_this_boot = process.boot_id != "" and process.boot_id == _boot_id()
    is_visible = is_of_this_boot and process.pid_namespace != "" and process.pid_namespace == _pid_namespace()
    if not is_visible:
        return None
    return is_alive(process.pid) and _start_of(process.pid) == process.start


def is_of_this_machine(process: ProcessIdentity) -> bool:
    """Return whether a process was started on this machine since it booted, perhaps in another container."""
    return process.boot_id != "" and process.boot_id == _boot_id()


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


def _boot_id() -> str:
    """Return the kernel's random id of this boot, which all containers of a machine share; "" if there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
