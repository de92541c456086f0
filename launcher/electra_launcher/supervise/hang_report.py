"""Record in one folder, RUN/hangs/START/, what the ranks of all nodes were doing when a rank hung.

    hangs/job-4711-0-start-000002/node-0.txt      why the ranks are ended, and the stacks of all ranks of node 0
    hangs/job-4711-0-start-000002/nccl-3          NCCL's record of the last collectives of rank 3 (flight recorder)

Guarantee: the supervisor that finds a hung rank writes the file of its node before it kills its ranks, and first waits
up to 10 s for the files of the other nodes. When the ranks of one node are killed, the collectives of the other nodes
fail, and the stacks of their ranks no longer show the hang.

How: the supervisor that finds a hung rank creates the folder. The others look for it once per second, and write their
files when it exists.

Limits: if a file cannot be written, one line in the log names the reason. NCCL's records exist only on GPUs: torch
writes the record of a rank after something was written into the rank's pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). The
program `torchfrtrace` reads the records.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from electra_launcher.supervise.rank_processes import write_to_pipe

# Prefixes of the names of two files per rank in the temporary state folder of a node; the rank's number follows.
_NCCL_TRACE = "nccl-trace-"
_NCCL_PIPE = "nccl-pipe-"
_TRACE_EVENTS = "2000"  # how many of its newest collectives the record of a rank holds
_OTHER_NODES_S = 10.0  # how long the node with the hung rank waits for the files of the other nodes
_POLL_S = 0.2  # between two looks for the files of the other nodes


class HangReport:
    """Report of a hang, to which the supervisor of each node adds a file. Make a new one for each start of the ranks.

    The supervisor that finds a hung rank calls `begin`, `write` and `await_other_nodes`. The supervisors of the other
    nodes poll `was_begun`; when it is True, they call `write`.
    """

    def __init__(self, folder: Path, node: int, num_nodes: int, log: Callable[[str], None]) -> None:
        self._folder = folder
        self._node = node
        self._num_nodes = num_nodes
        self._log = log

    @property
    def was_begun(self) -> bool:
        """Return whether any node has found a hung rank since the ranks were started (the report's folder exists)."""
        return self._folder.exists()

    def begin(self) -> None:
        """Create the folder of the report, which makes the supervisors of the other nodes write their files."""
        with self._logging_failures():
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, why: str, stacks: Sequence[str], state: Path) -> None:
        """Write `why` and the `stacks` into this node's file of the report; copy NCCL's records from `state` to it."""
        with self._logging_failures():
            for trace in sorted(state.glob(f"{_NCCL_TRACE}*")):
                shutil.copyfile(trace, self._folder / f"nccl-{trace.name.removeprefix(_NCCL_TRACE)}")
            unfinished = self._folder / f"node-{self._node}.tmp"
            unfinished.write_text("\n".join([why, *stacks, ""]), encoding="utf-8")
            unfinished.rename(self._folder / f"node-{self._node}.txt")

    def await_other_nodes(self) -> None:
        """Wait until all nodes, this one included, have written their files of the report, but at most 10 s."""
        deadline = time.monotonic() + _OTHER_NODES_S
        while time.monotonic() < deadline:
            num_written = len(list(self._folder.glob("node-*.txt")))
            if num_written >= self._num_nodes:
                return
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _logging_failures(self) -> Iterator[None]:
        """Log an OSError of the `with` block instead of raising it, because the ranks must be killed in any case."""
        try:
            yield
        except OSError as error:
            self._log(f"{self._folder}: the report of the hang is not complete ({error.strerror})")


def nccl_environment(state: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which torch 2.13 records a rank's NCCL collectives in a file below `state`.

    torch writes the record when a collective times out, and when `request_nccl_traces` is called. torch also ends a
    process whose collective failed or timed out. Variables in `inherited` are left out: the user's values apply.
    """
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # End the process without NCCL's clean-up, which may hang, too.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": _TRACE_EVENTS,
        # torch appends the rank's number to both paths.
        "TORCH_FR_DUMP_TEMP_FILE": str(state / _NCCL_TRACE),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(state / _NCCL_PIPE),
    }
    return {name: value for name, value in variables.items() if name not in inherited}


def request_nccl_traces(state: Path) -> None:
    """Ask torch to write NCCL's records of this node's ranks into the folder `state`; return before it has."""
    for pipe in state.glob(f"{_NCCL_PIPE}*"):
        write_to_pipe(pipe, b"1\n")
