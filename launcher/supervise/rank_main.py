"""Run one rank under `launcher.supervise`: call pretrain.py, and record pid, exit code and stacks for the supervisor.

Guarantee: `--state` names a folder with the files of one start of a node's ranks. For each rank R they are:
- `pid-R`: the rank's pid, written before anything slow begins.
- `exit-R`: the exit code with which the rank itself ended. A rank that is killed writes none.
- `stack-R`: the Python stacks of all threads, appended whenever the rank receives STACK_SIGNAL. This works also inside
  a collective, because faulthandler writes them from the signal handler and does not need the interpreter lock.

The rank is bound to the CPU cores near its GPU (electra_dist/gpu_cores.py). If the supervisor ends, the rank saves and
stops (supervisor_watch.py).

Limits: a process that is stopped (SIGSTOP) writes its stacks only after it is continued.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from electra_dist.engine.rank_environment import whole_number
from electra_dist.errors import EXIT_CRASH, EXIT_DONE
from electra_dist.gpu_cores import VISIBLE_DEVICES, bind_to_gpu
from electra_dist.store.atomic_files import replacing
from electra_dist.store.patience import Patience
from launcher import pretrain
from launcher.lasting_output import outlive_the_reader
from launcher.supervise.supervisor_watch import read_supervisor, watch_supervisor

_PATIENCE_S = 900.0  # the config, which may set another patience, is not read yet
STACK_SIGNAL = signal.SIGRTMIN + 7  # no library in use claims this signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rank whose number is in the variable RANK; record its pid and exit code in the `--state` folder.

    All arguments except `--state` and `--visible-devices` go to `pretrain.main`. An exception of `pretrain.main` is
    raised again; the recorded exit code is then that of a SystemExit, otherwise EXIT_CRASH.
    """
    parser = argparse.ArgumentParser(prog="rank_main.py", allow_abbrev=False)
    parser.add_argument("--state", type=Path, required=True, help="folder of this start on this node")
    parser.add_argument("--visible-devices", help="CUDA_VISIBLE_DEVICES of the supervisor; not given: it has none")
    args, pretrain_arguments = parser.parse_known_args(argv)
    if args.visible_devices is not None:
        os.environ[VISIBLE_DEVICES] = args.visible_devices  # DeepSpeed's launcher has set it to 0, 1, ...
    rank = whole_number("RANK", 0)
    outlive_the_reader()
    bind_to_gpu(whole_number("LOCAL_RANK", 0), os.environ)
    faulthandler.enable()  # A fault such as SIGSEGV prints the stacks to stderr.
    stack_file = (args.state / f"stack-{rank}").open("wb", buffering=0)
    faulthandler.register(STACK_SIGNAL, file=stack_file)
    _write(args.state / f"pid-{rank}", os.getpid())
    watch_supervisor(read_supervisor(args.state), rank)
    code = EXIT_CRASH  # This is recorded if pretrain raises anything other than SystemExit.
    try:
        code = pretrain.main(pretrain_arguments)
        return code
    except SystemExit as system_exit:
        code = _exit_code(system_exit)
        raise
    finally:
        _write(args.state / f"exit-{rank}", code)


def _exit_code(system_exit: SystemExit) -> int:
    """Return the exit code of a process that a SystemExit ends: the exception's number, 0 for None, 1 for a text."""
    if isinstance(system_exit.code, int):
        return system_exit.code
    has_message = bool(system_exit.code)
    return EXIT_CRASH if has_message else EXIT_DONE


def _write(file: Path, number: int) -> None:
    """Write a number to a file in one atomic step; wait while the disk is full or away."""

    def write() -> None:
        with replacing(file) as out:
            out.write(str(number).encode())

    Patience(_PATIENCE_S).call(write)


if __name__ == "__main__":
    sys.exit(main())
