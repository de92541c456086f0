"""Change the environment variables and the command line that /proc shows of a forked process.

The supervisor and the drill find the processes of a run by variables in /proc/PID/environ and by words in
/proc/PID/cmdline. The kernel reads both from memory of the process, into which it wrote them when the program was
started. A fork has a copy of this memory, so it shows the same as its parent. This module overwrites that memory.

Limits: Linux only. The program must be started with an environment that has room (`start_again_with_room`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOM_VARIABLE = "ELECTRA_DIST_DRILL_ROOM"
_ROOM_BYTES = 2000
# Indices of fields in /proc/self/stat, counted from the field after the command's name in parentheses.
_ARGUMENTS_BEGIN, _ARGUMENTS_END, _ENVIRONMENT_BEGIN, _ENVIRONMENT_END = range(45, 49)


class ProcessNames:
    """Access to the memory from which /proc shows the environment and the command line of this process.

    Create one object before the first fork. Forks inherit it; each method changes what /proc shows of the process that
    calls it.
    """

    def __init__(self) -> None:
        """Find the addresses of that memory.

        Raises:
            ValueError: the program was not started by `start_again_with_room`.
        """
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._arguments_at = int(fields[_ARGUMENTS_BEGIN])
        self._arguments_size = int(fields[_ARGUMENTS_END]) - self._arguments_at
        environment_at = int(fields[_ENVIRONMENT_BEGIN])
        environment = ctypes.string_at(environment_at, int(fields[_ENVIRONMENT_END]) - environment_at)
        self._room_at = environment_at + environment.index(f"{_ROOM_VARIABLE}=".encode())

    def set_variables(self, variables: Mapping[str, str]) -> None:
        """Make /proc/PID/environ show these variables instead of those of the last call; others are still shown.

        The environment that this process itself reads (`os.environ`) is not changed. There is room for 2,000 bytes.
        """
        entries = "\0".join(f"{name}={value}" for name, value in variables.items()).encode()
        assert len(entries) < _ROOM_BYTES, variables
        ctypes.memmove(self._room_at, entries.ljust(_ROOM_BYTES, b"\0"), _ROOM_BYTES)

    def set_command(self, *words: str) -> None:
        """Make /proc/PID/cmdline show these words; they are cut to the length of the original command line."""
        command = "\0".join(words).encode()[: self._arguments_size - 1]
        ctypes.memmove(self._arguments_at, command.ljust(self._arguments_size, b"\0"), self._arguments_size)


def start_again_with_room() -> None:
    """Start this program again with a long variable in its environment, which `ProcessNames` can overwrite.

    The new program replaces this process. There, the call removes the variable from `os.environ` and returns. Call it
    before slow imports, because they are repeated.
    """
    if os.environ.pop(_ROOM_VARIABLE, None) is None:
        environment = {**os.environ, _ROOM_VARIABLE: "x" * _ROOM_BYTES}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
