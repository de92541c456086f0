"""Collect what the ranks of all nodes were doing when one hung: RUN/hangs/START/, a file for each node.

    hangs/job-4711-0-start-000002/node-0.txt      why, and the stacks of all ranks of node 0
    hangs/job-4711-0-start-000002/nccl-3          NCCL's record of the last collectives of rank 3 (flight recorder)

Guarantee: the supervisor that finds a hung rank writes its file before it ends its ranks, and waits a few seconds for
the files of the other nodes. The folder tells these to write theirs: as soon as the ranks of one node are killed, the
collectives of the others fail, and what they were doing is lost.

Cost: one look for the folder every second on each node.

Limits: a file that cannot be written is one line in the log. NCCL's records exist only on GPUs. torch writes one when
something is written into the pipe of a rank (TORCH_NCCL_DEBUG_INFO_PIPE_FILE); `torchfrtrace` reads them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_NCCL_TRACE, _NCCL_PIPE = (
    "nccl-trace-",
    "nccl-pipe-",
)  # files in the state folder of a start; the rank's number follows
_TRACE_EVENTS = "2000"  # newest collectives of a rank that are kept
_OTHER_NODES_S = 10.0  # how long the first node waits for the files of the others
_POLL_S = 0.2


class HangReport:
    """The folder of one start of the ranks in which all nodes describe a hang."""

    def __init__(self, folder: Path, node: int, num_nodes: int, log: Callable[[str], None]) -> None:
        """Prepare a report; nothing is written.

        Args:
            folder: equal on all nodes, and different for each start of the ranks.
            node: number of this node, from 0.
            num_nodes: number of nodes of the run.
            log: receives a line if the folder cannot be written.
        """
        self._folder = folder
        self._node = node
        self._num_nodes = num_nodes
        self._log = log

    @property
    def was_begun(self) -> bool:
        """Whether a node has found a hung rank in this start."""
        return self._folder.exists()

    def begin(self) -> None:
        """Make the folder, so that the other nodes describe their ranks, too."""
        with self._logging_failures():
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, why: str, stacks: Sequence[str], state: Path) -> None:
        """Write the file of this node, and copy the records of NCCL that its ranks have written.

        Args:
            why: why the ranks of this node are ended, as one line.
            stacks: lines of text about all ranks of this node.
            state: folder of this start on this node, see `nccl_environment`.
        """
        with self._logging_failures():
            for trace in sorted(state.glob(f"{_NCCL_TRACE}*")):
                shutil.copyfile(trace, self._folder / f"nccl-{trace.name.removeprefix(_NCCL_TRACE)}")
            unfinished = self._folder / f"node-{self._node}.tmp"
            unfinished.write_text("\n".join([why, *stacks, ""]), encoding="utf-8")
            unfinished.rename(self._folder / f"node-{self._node}.txt")

    def await_other_nodes(self) -> None:
        """Wait until all nodes have written their files, for up to 10 s."""
        deadline = time.monotonic() + _OTHER_NODES_S
        while time.monotonic() < deadline and len(list(self._folder.glob("node-*.txt"))) < self._num_nodes:
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _logging_failures(self) -> Iterator[None]:
        """Log an error of the operating system and go on: the ranks must be ended in any case."""
        try:
            yield
        except OSError as error:
            self._log(f"{self._folder}: the report of the hang is not complete ({error.strerror})")


def nccl_environment(state: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which torch keeps a record of NCCL's last collectives, and writes it into a folder.

    torch ends a process whose collective fails or times out (value 3 of TORCH_NCCL_ASYNC_ERROR_HANDLING: without the
    clean-up that may hang itself). The names are those of torch 2.13.

    Args:
        state: folder of this start on this node.
        inherited: variables that are set already; they are not changed.
    """
    trace, pipe = str(state / _NCCL_TRACE), str(state / _NCCL_PIPE)
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": _TRACE_EVENTS,
        "TORCH_FR_DUMP_TEMP_FILE": trace,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": pipe,
    }
    return {name: value for name, value in variables.items() if name not in inherited}


def request_nccl_traces(state: Path) -> None:
    """Ask each rank of this node for its record of NCCL's collectives; torch writes it within seconds."""
    for pipe in state.glob(f"{_NCCL_PIPE}*"):
        with contextlib.suppress(OSError):  # A pipe without a reader is that of a rank that has ended.
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1\n")
            finally:
                os.close(descriptor)
