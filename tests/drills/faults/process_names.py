"""Give a forked process the environment and the command line that other processes see in /proc.

The supervisor and the drill find the processes of a run by variables in /proc/PID/environ and by words in
/proc/PID/cmdline. The kernel reads both from memory that a program gets when it is started, so a process that was only
forked shows those of the program. This module writes over that memory.

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
# Fields of /proc/self/stat, counted from the one after the command's name, which stands in parentheses.
_ARGUMENTS_BEGIN, _ARGUMENTS_END, _ENVIRONMENT_BEGIN, _ENVIRONMENT_END = range(45, 49)


class ProcessNames:
    """The memory of this program from which /proc shows its environment and its command line.

    Create it once, before forks. The methods change the process that calls them.
    """

    def __init__(self) -> None:
        """Find the memory.

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
        """Show these variables in /proc/PID/environ, in place of those of an earlier call."""
        entries = "\0".join(f"{name}={value}" for name, value in variables.items()).encode()
        assert len(entries) < _ROOM_BYTES, variables
        ctypes.memmove(self._room_at, entries.ljust(_ROOM_BYTES, b"\0"), _ROOM_BYTES)

    def set_command(self, *words: str) -> None:
        """Show these words in /proc/PID/cmdline, as far as there is room for them."""
        command = "\0".join(words).encode()[: self._arguments_size - 1]
        ctypes.memmove(self._arguments_at, command.ljust(self._arguments_size, b"\0"), self._arguments_size)


def start_again_with_room() -> None:
    """Replace this program by itself with room in its environment, unless it has that already.

    Call it before anything is imported that takes time.
    """
    if os.environ.pop(_ROOM_VARIABLE, None) is None:
        environment = {**os.environ, _ROOM_VARIABLE: "x" * _ROOM_BYTES}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
