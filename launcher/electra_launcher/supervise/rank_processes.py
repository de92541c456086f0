"""Say which ranks of a run are on this node, and manage their processes: start, signal, inspect and kill them.

Guarantees:
- The ranks are children of the supervisor, each in a session of its own: Ctrl-C and the end of a terminal reach only
  the supervisor, which passes signals on. How a rank has ended, the kernel tells.
- The ranks ignore SIGTERM, SIGUSR1 and SIGUSR2 from before their first exec until they install handlers, so that a
  rank that is still importing survives these signals. A rank is sent a signal only once it has its own handler.
- `kill` ends all processes of this start of the ranks, and those that earlier starts left running: all of them have
  the environment variable MARK with the same value.
- What a rank writes to stderr goes to the supervisor's stderr, and its last 64 KiB are kept: they tell why it ended. A
  rank whose supervisor has ended writes to nobody, and goes on. A traceback and C++ frames are held back until
  `show_ends`, at most 10 s in silence: of ranks that ended because another one did, they would bury the cause.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR, UserError
from electra_dist.gpu_affinity import VISIBLE_DEVICES, num_gpus, visible_devices
from electra_dist.run.this_node import MARK, is_alive, marked_pids, status_field
from electra_dist.store.atomic_files import is_private
from electra_dist.store.patience import Patience, waits
from electra_launcher.supervise.rank_main import STACK_SIGNAL

NUM_PORTS = 64  # consecutive starts of the ranks use the ports in turn
_DEFAULT_PORT = 29500
_LAST_FIRST_PORT = 65536 - NUM_PORTS


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Place of one node's ranks in a run: the node's number, the numbers of nodes and ranks, and where all meet."""

    node: int  # number of this node, from 0
    num_nodes: int
    ranks_per_node: int
    address: str = "127.0.0.1"  # host name or address of node 0, where the ranks connect to each other first
    port: int | None = None  # first of 64 ports on node 0; each start of the ranks uses the next one; None: any free

    @classmethod
    def from_options(
        cls, *, nodes: int, node: int, ranks_per_node: int | None, address: str | None, port: int | None
    ) -> Placement:
        """Build the placement from command-line options; raise UserError if they are wrong or contradict each other.

        `ranks_per_node` None means one rank per visible GPU, at least one. A `port` of None means 29500 with several
        nodes, any free port with one. Several nodes also need an `address`.
        """
        num_ranks = local_devices() if ranks_per_node is None else ranks_per_node
        if min(nodes, num_ranks) < 1:
            raise UserError("--nodes and --gpus-per-node must be at least 1; correct the option")
        if port is not None and not 0 < port <= _LAST_FIRST_PORT:
            raise UserError(
                f"--master-port {port} is not the first of {NUM_PORTS} TCP ports; set it to a number from 1 to "
                f"{_LAST_FIRST_PORT}"
            )
        if not 0 <= node < nodes:
            raise UserError(
                f"--node-rank {node} is not the number of one of the {nodes} nodes; "
                f"set --node-rank to a number from 0 to {nodes - 1}"
            )
        if nodes > 1 and not address:
            raise UserError(
                f"--master-addr is missing for {nodes} nodes; set it to the host name or address of node 0"
            )
        if nodes > 1 and port is None:
            port = _DEFAULT_PORT  # All nodes must know the port, so it cannot be any free one.
        return cls(node=node, num_nodes=nodes, ranks_per_node=num_ranks, address=address or "127.0.0.1", port=port)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the run, on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks(self) -> range:
        """Return the numbers of the ranks on this node, for example 8 to 15 on node 1 of 2 nodes with 8 ranks each."""
        first_rank = self.node * self.ranks_per_node
        return range(first_rank, first_rank + self.ranks_per_node)

    @property
    def names(self) -> str:
        """Return the ranks on this node as text for the log, for example "8 to 15 of 16"."""
        return f"{self.ranks[0]} to {self.ranks[-1]} of {self.num_ranks}"

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Return the environment variables that tell a rank its place; all ranks meet at `port` on node 0.

        Torch, DeepSpeed and `electra_dist/engine/rank_environment.py` read them; DeepSpeed's launcher sets the same.
        If nothing says which GPUs of this node are the run's, they are the first ones, one for each rank.
        """
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks[0]),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
        }
        if VISIBLE_DEVICES not in os.environ and num_gpus() > self.ranks_per_node:
            # Otherwise the power and the faults of GPUs of other runs would count as this run's.
            variables[VISIBLE_DEVICES] = ",".join(str(number) for number in range(self.ranks_per_node))
        return variables


def local_devices(root: Path = Path("/")) -> int:
    """Return the number of GPUs that CUDA would show, at least 1, without the driver: a faulty one can hang."""
    return max(1, len(visible_devices(os.environ, root)))


RANK_PROGRAM = ("-m", "electra_launcher.supervise.rank_main")  # options of Python with which each rank is started
_FOLDER_PREFIX = "electra-dist-ranks-"  # of the state folder of a start, in the folder for temporary files
_STACK_WAIT_S = 3.0  # how long `stacks` waits until all ranks have written their stacks
_STACK_QUIET_S = 0.3  # a rank writes its stacks, the main thread's last, without a longer pause
_KILL_WAIT_S = 30.0  # how long `kill_marked` repeats SIGKILL before it gives up
_OUTPUT_BYTES = 1 << 16  # how much of the end of a rank's stderr is kept
_END_S = 10.0  # how long a traceback is held back if the rank writes nothing else
_BEGINS_END = re.compile(rb"^.*(Traceback \(most recent call last\):|Exception raised from |frame #0: )", re.MULTILINE)
_LAST_OUTPUT_S = 2.0  # how long `close` waits for the output of a rank that has ended
_IGNORE_SIGNALS = 'trap "" TERM USR1 USR2; exec "$@"'  # An ignored signal stays ignored across exec.
_ENDS_ON_PURPOSE = (EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR)


class RankProcesses:
    """This node's rank processes of one start of the run. Call `start` once, and `close` in a `finally` block."""

    def __init__(self, mark: str, patience: Patience | None = None) -> None:
        """Make the folder `state` for the ranks' stacks, and delete those that killed supervisors have left.

        `mark` identifies the run and node; no process with this mark may run.
        """
        self.patience = patience
        self._mark = mark
        self._folder = self._make_folder()
        self.state = Path(self._folder.name)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._outputs: dict[int, _Output] = {}  # by rank
        self._sent: set[tuple[int, int]] = set()  # (pid, signal)
        self.started = time.monotonic()

    def start(self, placement: Placement, port: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start each rank of `placement`, with `environment` added; `arguments` are those of launcher/pretrain.py."""
        self.started = time.monotonic()
        command = ["sh", "-c", _IGNORE_SIGNALS, "sh", sys.executable, "-u", *RANK_PROGRAM]
        command += ["--state", str(self.state), "--supervisor", str(os.getpid()), *arguments]
        variables = {**os.environ, **environment, MARK: self._mark}
        for rank in placement.ranks:
            self._processes[rank] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**variables, **placement.environment(rank, port)},
                start_new_session=True,
            )
            self._outputs[rank] = _Output(self._processes[rank])

    @waits
    def _make_folder(self) -> tempfile.TemporaryDirectory[str]:
        prefix = f"{_FOLDER_PREFIX}{hashlib.sha256(os.fsencode(self._mark)).hexdigest()[:16]}-"
        _delete_folders(prefix)
        return tempfile.TemporaryDirectory(prefix=prefix)

    def pids(self) -> dict[int, int]:
        """Return rank -> pid of all ranks, including those that have ended."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def outputs(self) -> dict[int, str]:
        """Return rank -> the last 64 KiB that it has written to stderr; call it after `close`."""
        return {rank: output.text() for rank, output in self._outputs.items()}

    def show_ends(self, hidden: Collection[int] = ()) -> None:
        """Write the tracebacks that were held back to stderr, but not those of the ranks `hidden`; after `close`."""
        for rank, output in self._outputs.items():
            if rank not in hidden:
                _write_to_stderr(output.held)

    def codes(self) -> dict[int, int]:
        """Return rank -> exit code of the ranks that have ended; -N for a rank that signal N has ended."""
        ended = [rank for rank, process in self._processes.items() if process.poll() is not None]
        return {rank: self._processes[rank].returncode for rank in ended}

    def alive(self) -> dict[int, int]:
        """Return rank -> pid of the ranks that run."""
        return {rank: process.pid for rank, process in self._processes.items() if process.poll() is None}

    def stopped(self) -> list[int]:
        """Return the ranks that cannot execute now: stopped by a signal or a debugger, or blocked in the kernel."""
        return [rank for rank, pid in sorted(self.alive().items()) if status_field(pid, "State")[:1] in "TtD"]

    def tell(self, number: int) -> list[int]:
        """Send signal `number` once to each rank that has a handler for it; return the ranks that got it in this call.

        Call it repeatedly: a rank that is still importing has no handler and is skipped until it has installed one.
        """
        signalled = []
        for rank, pid in self.alive().items():
            was_sent = (pid, number) in self._sent
            if was_sent or not _catches(pid, number):
                continue
            with contextlib.suppress(ProcessLookupError):  # The rank may have ended since `alive` was called.
                os.kill(pid, number)
                self._sent.add((pid, number))
                signalled.append(rank)
        return signalled

    def stacks(self) -> list[str]:
        """Return what every rank is doing, as lines of text: the kernel's view of it, then its Python stacks.

        A stopped rank is continued (SIGCONT), because it could not write its stacks otherwise. Blocks for up to 3 s in
        all. A rank that has not answered by then gets the line "no answer within 3 s".
        """
        pids = self.alive()
        kernel_views = {rank: _kernel_view(pid) for rank, pid in pids.items()}
        files = {rank: _StackFile(self.state / f"stack-{rank}") for rank in pids}
        self._request_stacks(pids, files)
        lines = []
        for rank in sorted(pids):
            lines.append(f"rank {rank}, pid {pids[rank]}: {kernel_views[rank]}")
            stack_lines = condensed(files[rank].new_text()) or [f"no answer within {_STACK_WAIT_S:.0f} s"]
            lines += [f"  {line}" for line in stack_lines]
        return lines

    def _request_stacks(self, pids: Mapping[int, int], files: Mapping[int, _StackFile]) -> None:
        """Ask each rank to append its stacks to its file, and wait up to 3 s until all have; both maps are by rank."""
        # A thread of each rank answers a request in its pipe, unless another thread keeps the interpreter lock.
        for rank, pid in pids.items():
            write_to_pipe(self.state / f"ask-{rank}", b"1")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + _STACK_WAIT_S
        _await_stacks(files.values(), deadline - _STACK_WAIT_S / 2)
        for rank, pid in pids.items():
            # No answer: a library call keeps the lock, so no thread runs Python, and the signal is safe.
            if files[rank].growth() == 0 and _catches(pid, STACK_SIGNAL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        _await_stacks(files.values(), deadline)

    def close(self) -> list[int]:
        """Kill all processes of the ranks and delete the folder `state`; return the pids that could not be killed."""
        left = kill_marked(self._mark, self.alive().values())
        for process in self._processes.values():
            if process.pid not in left:
                process.wait()
        for output in self._outputs.values():
            output.join(_LAST_OUTPUT_S)
        self._folder.cleanup()
        return left


def is_lost(code: int) -> bool:
    """Return whether a rank with this exit code was killed, was aborted by a library, or has crashed."""
    return code not in _ENDS_ON_PURPOSE


def kill_marked(mark: str, also: Iterable[int] = ()) -> list[int]:
    """Send SIGKILL to all processes whose variable MARK is `mark`, and to the pids `also`, until none is left.

    All starts of a run's ranks on a node have the same mark. Returns the pids of processes that still exist after
    30 s: they are blocked in the kernel on a device, and only a reboot ends them.
    """
    deadline = time.monotonic() + _KILL_WAIT_S
    # A process that is ending has lost its environment, and so its mark, before it has closed its files and devices.
    # Therefore those found once are waited for.
    children = set(also)
    found = set(children)
    # Repeat, because a process may start another one between the listing and its own end.
    while True:
        marked = marked_pids(mark)
        found.update(marked)
        left = sorted(pid for pid in found if is_alive(pid))
        for pid in {*marked, *children.intersection(left)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not (marked or left) or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _delete_folders(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if is_private(folder):  # The folder is in a shared directory, where another user may have made it.
            shutil.rmtree(folder, ignore_errors=True)


def condensed(stacks: str) -> list[str]:
    """Shorten the stacks of all threads, as faulthandler prints them: one line per call, equal stacks only once.

    A line such as `2 threads:` comes before each stack, and each call is a line such as `  /a/b.py:7 wait`. The main
    thread comes first. The innermost call of a stack comes first.
    """
    # Each thread is a block: a heading such as "Thread 0x7f12 (most recent call first):", then one line per call.
    blocks = [block for block in stacks.strip().split("\n\n") if block]
    calls_of_threads = [tuple(block.splitlines()[1:]) for block in reversed(blocks)]
    lines = []
    for calls, num_threads in Counter(calls_of_threads).items():
        lines.append("1 thread:" if num_threads == 1 else f"{num_threads} threads:")
        lines += [f"  {_short_call(call)}" for call in calls]
    return lines


def _short_call(line: str) -> str:
    match = re.fullmatch(r'\s*File "(?P<file>.*)", line (?P<number>\d+) in (?P<name>.*)', line)
    if match is None:
        return line.strip()
    return f"{match['file']}:{match['number']} {match['name']}"


class _Output(threading.Thread):
    """Thread that passes on what a rank writes to stderr but tracebacks, and keeps the last 64 KiB of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(name=f"stderr-{process.pid}", daemon=True)
        assert process.stderr is not None
        self._pipe = process.stderr
        self._kept = b""
        self.held = b""  # from the first line of a traceback on, which was not shown yet
        self.start()

    def run(self) -> None:
        """Read until the rank closes its stderr. If nobody read, the pipe would fill, and the rank would block."""
        descriptor = self._pipe.fileno()
        with self._pipe:
            while True:
                is_silent = self.held and not select.select([descriptor], [], [], _END_S)[0]
                if is_silent or len(self.held) > _OUTPUT_BYTES:
                    _write_to_stderr(self.held)
                    self.held = b""
                data = os.read(descriptor, _OUTPUT_BYTES)
                if not data:
                    return
                self._kept = (self._kept + data)[-_OUTPUT_BYTES:]
                begin = _BEGINS_END.search(data)
                shown = len(data) if begin is None else begin.start()
                if not self.held:
                    _write_to_stderr(data[:shown])
                    data = data[shown:]
                self.held += data

    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _write_to_stderr(data: bytes) -> None:
    """Write to this process's stderr; a failure is ignored."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


class _StackFile:
    """File to which a rank appends its stacks; what it held when this object was made does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old_size = self._size()

    def growth(self) -> int:
        """Return by how many bytes the file has grown; 0 if the rank, which still imports, has not made it yet."""
        return self._size() - self._old_size

    def new_text(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._path.read_bytes()[self._old_size :].decode(errors="replace")
        return ""

    def _size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_size
        return 0


def write_to_pipe(pipe: Path, request: bytes) -> None:
    """Write `request` into a named pipe; do nothing if the rank that reads it has not made it yet or has ended."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, request)
        finally:
            os.close(descriptor)


def _await_stacks(files: Collection[_StackFile], deadline: float) -> None:
    """Wait until every file has grown and none grows any more, at most until `deadline` of the monotonic clock."""
    growths: list[int] = []
    settled_at = deadline
    while time.monotonic() < min(settled_at, deadline):
        time.sleep(0.05)
        growths_before, growths = growths, [file.growth() for file in files]
        if 0 in growths:
            settled_at = deadline
        elif growths != growths_before:
            settled_at = time.monotonic() + _STACK_QUIET_S


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for signal `number`, so that the signal neither ends it nor is lost."""
    caught_mask = status_field(pid, "SigCgt")  # hexadecimal; signal n has a handler if the bit of value 2^(n-1) is set
    if not caught_mask:
        return False
    bit_of_signal = 1 << (number - 1)
    return int(caught_mask, 16) & bit_of_signal != 0


def _kernel_view(pid: int) -> str:
    """Return a process's state and where it waits in the kernel, as "S (sleeping), wchan futex_wait_queue"."""
    parts = [status_field(pid, "State")]
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):
            # `wchan` names the kernel function in which the process waits; `stack`, which only root may read, all its
            # callers.
            kernel_text = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
            frames = kernel_text.replace("[<0>] ", "").split("\n")
            text = " < ".join(frames).strip(" <")
            is_waiting = text.strip("0") != ""  # wchan is "0" for a process that runs
            if is_waiting:
                parts.append(f"{name} {text}")
    return ", ".join(part for part in parts if part)
