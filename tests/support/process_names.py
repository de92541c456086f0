"""Change the command line and the environment that /proc shows of a forked process.

The product finds the processes of a run by variables in /proc/PID/environ and by words in /proc/PID/cmdline. The
kernel reads both from memory of the process, into which it wrote them when the program was started. A fork has a copy
of this memory, so it shows the same as its parent. This module overwrites that memory.

Limits: Linux only. There must be room: start the program with a long variable in its environment and a long argument
(`start_again_with_room`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOM_VARIABLE = "ELECTRA_DIST_TESTS_ROOM"
ROOM = {ROOM_VARIABLE: "x" * 30_000}  # more than the environment of a fork grows by
# Indices of fields in /proc/self/stat, counted from the field after the command's name in parentheses.
_COMMAND_BEGIN, _COMMAND_END, _ENVIRONMENT_BEGIN, _ENVIRONMENT_END = range(45, 49)


class ProcessNames:
    """Access to the memory from which the kernel reads what /proc shows of a process. Forks inherit it.

    Each method changes what /proc shows of the process that calls it.
    """

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._command_at = int(fields[_COMMAND_BEGIN])
        self._command_size = int(fields[_COMMAND_END]) - self._command_at
        self._environment_at = int(fields[_ENVIRONMENT_BEGIN])
        self._environment_size = int(fields[_ENVIRONMENT_END]) - self._environment_at

    def set_command(self, *words: str) -> None:
        """Make /proc/PID/cmdline show these words, cut to the length of the program's own command line.

        Zero bytes follow, up to that length.
        """
        _overwrite(self._command_at, self._command_size, words)

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Make /proc/PID/environ show these variables, followed by zero bytes. `os.environ` is not changed."""
        entries = [f"{name}={value}" for name, value in variables.items()]
        size = sum(len(os.fsencode(entry)) + 1 for entry in entries)
        assert size <= self._environment_size, f"{size} bytes of environment, room for {self._environment_size}"
        _overwrite(self._environment_at, self._environment_size, entries)


def _overwrite(address: int, size: int, words: Sequence[str]) -> None:
    content = b"\0".join(map(os.fsencode, words))[: size - 1]
    ctypes.memmove(address, content.ljust(size, b"\0"), size)


def start_again_with_room() -> None:
    """Start this program again with room in its command line and environment, which `ProcessNames` can overwrite.

    The new program replaces this process. There, the call removes the variable from `os.environ` and returns. Call it
    before slow imports, because they are repeated.
    """
    if os.environ.pop(ROOM_VARIABLE, None) is None:
        room = ["-X", f"room={'x' * 20_000}"]  # an option that Python does not know and ignores
        os.execve(sys.executable, [sys.executable, *room, *sys.orig_argv[1:]], {**os.environ, **ROOM})
