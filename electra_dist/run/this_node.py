"""Name this node and its boot, find the processes of a run on it, and tell how long ago this one began.

The processes of a run are found by an environment variable that their supervisor sets.

Limits: Linux only, because it reads /proc. Processes of another pid namespace, hence of another container, are not
visible.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "ELECTRA_DIST_SUPERVISED"  # environment variable that a supervisor sets for all processes that it starts


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name: under Slurm the name that `sbatch --exclude` understands, otherwise the host name."""
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return os.fsencode(name).decode(errors="replace")  # The kernel accepts host names of any bytes.


def mark_of(run_dir: Path, node: int) -> str:
    """Return a text, such as "/runs/large#0", that marks all processes of a run on a node.

    A supervisor gives it to every process that it starts, in the environment variable `MARK`. So its processes can be
    found after its death.
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


def boot_id() -> str:
    """Return the kernel's random id of this boot, equal in all containers of a machine; "" if it is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def seconds_since_process_start() -> float:
    """Return the seconds since the operating system started this process, by a clock that does not jump."""
    # The text before the last ")" is the name of the program. The 22nd field is the start in ticks since the boot.
    fields_after_name = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started_s = int(fields_after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
