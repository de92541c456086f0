"""Run one rank under the supervisor: call pretrain.py, show its stacks on request, and end with the supervisor.

Guarantee: when a byte is written into the pipe `ask-R` in the folder `--state`, a thread of the rank appends the
Python stacks of all threads to the file `stack-R` there. It holds the interpreter lock meanwhile, so that no other
thread changes its stack. If a hung library call keeps the lock, the signal STACK_SIGNAL makes faulthandler write the
stacks without it. While threads run Python, this signal can crash the rank. The rank is bound to the CPU cores near
its GPU (electra_dist/gpu_affinity.py).

When the supervisor ends while the rank runs, whatever has killed it, the rank saves a checkpoint and stops, as after
SIGTERM, so that no rank trains on unwatched. A rank that has not installed its signal handlers yet has nothing to save
and ends at once with exit code 75. A rank that has not ended `_GRACE_S` seconds later ends without a save, with exit
code 1. The kernel's death signal (PR_SET_PDEATHSIG) would not do, because a rank that is still importing ignores
SIGTERM and would then train on.

Limits: a process that is stopped (SIGSTOP) writes its stacks only after it is continued.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from electra_dist.engine.rank_environment import whole_number
from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED
from electra_dist.escapes import printable
from electra_dist.gpu_affinity import bind_to_gpu
from electra_dist.train.stop_request import UNWATCHED_SIGNAL
from electra_launcher import pretrain
from electra_launcher.entry import end_process_with, outlive_the_reader

STACK_SIGNAL = signal.SIGRTMIN + 7  # no library in use claims this signal
_GRACE_S = 120.0  # how long the rank may take to save and end after its supervisor has ended
_POLL_S = 1.0  # between two looks at the supervisor, on a kernel without pidfd_open (before Linux 5.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rank whose number is in the variable RANK, and return its exit code.

    All arguments except `--state` and `--supervisor` go to `pretrain.main`.
    """
    parser = argparse.ArgumentParser(prog="rank_main.py", allow_abbrev=False)
    parser.add_argument("--state", type=Path, required=True, help="folder of this start on this node")
    parser.add_argument("--supervisor", type=int, required=True, help="process id of the supervisor, the parent")
    args, pretrain_arguments = parser.parse_known_args(argv)
    rank = whole_number("RANK", 0)
    outlive_the_reader()
    bind_to_gpu(whole_number("LOCAL_RANK", 0), os.environ)
    faulthandler.enable()  # A fault such as SIGSEGV prints the stacks to stderr.
    stack_file = (args.state / f"stack-{rank}").open("wb", buffering=0)
    faulthandler.register(STACK_SIGNAL, file=stack_file)
    requests = _make_pipe(args.state / f"ask-{rank}")
    watch = threading.Thread(
        target=_watch, args=(args.supervisor, rank, requests, stack_file), name="supervisor-watch", daemon=True
    )
    watch.start()
    return pretrain.main(pretrain_arguments)


def _make_pipe(path: Path) -> int:
    """Make a named pipe and return its descriptor; `path` exists only once this process has the pipe open."""
    unopened = path.with_suffix(".tmp")
    os.mkfifo(unopened)
    descriptor = os.open(unopened, os.O_RDWR | os.O_NONBLOCK)
    unopened.rename(path)
    return descriptor


def _watch(supervisor: int, rank: int, requests: int, stack_file: BinaryIO) -> None:
    """Write stacks on request until the supervisor, given by its pid, has ended; then end this process.

    `requests` is the descriptor of the pipe in which the supervisor asks for stacks. A rank that trains is asked to
    save and stop, and is ended `_GRACE_S` seconds later if it has not; before the training it is ended at once. Never
    returns.
    """
    _answer_while_runs(supervisor, requests, stack_file)
    print(printable(f"rank {rank}: its supervisor (pid {supervisor}) has ended; saving and stopping"), flush=True)
    if not callable(signal.getsignal(UNWATCHED_SIGNAL)):
        os._exit(EXIT_STOPPED)  # The training has not begun.
    os.kill(os.getpid(), UNWATCHED_SIGNAL)
    time.sleep(_GRACE_S)
    os._exit(EXIT_CRASH)


def _answer_while_runs(parent: int, requests: int, stack_file: BinaryIO) -> None:
    """Append all stacks to `stack_file` when bytes arrive in the pipe `requests`, until `parent` has ended."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # It has ended already, or kernel or Python are too old for it.
        poll.register(os.pidfd_open(parent), select.POLLIN)
    while os.getppid() == parent:  # Once `parent` has ended, its number may belong to another process.
        ready = [descriptor for descriptor, _ in poll.poll(_POLL_S * 1000)]
        if requests in ready:
            os.read(requests, select.PIPE_BUF)
            faulthandler.dump_traceback(stack_file)


if __name__ == "__main__":
    end_process_with(main)
