"""What `launcher.supervise` has DeepSpeed start on every rank: pretrain.py, and three files that tell of it.

Guarantee: in the folder given by `--state`, which is this start's own, `pid-R` exists before anything slow begins,
`exit-R` holds the exit code that this rank itself chose (a rank that is killed leaves none), and STACK_SIGNAL has the
Python stacks of all its threads written to `stack-R`, also while it waits inside a collective: faulthandler writes
them from the signal handler itself and needs no interpreter lock.

Cost: nothing while nobody asks. A stopped process (SIGSTOP) answers once it is continued.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from electra_dist.errors import EXIT_CRASH, EXIT_DONE
from electra_dist.store.files import replacing
from launcher import pretrain

STACK_SIGNAL = signal.SIGRTMIN + 7  # no library of ours uses it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the process's exit code (errors.py)."""
    parser = argparse.ArgumentParser(prog="rank_main.py", allow_abbrev=False)
    parser.add_argument("--state", type=Path, required=True, help="folder of this start on this node")
    args, arguments = parser.parse_known_args(argv)
    rank = int(os.environ["RANK"])
    faulthandler.enable()  # of SIGSEGV and its like, to stderr
    faulthandler.register(STACK_SIGNAL, file=(args.state / f"stack-{rank}").open("wb", buffering=0))
    _write(args.state / f"pid-{rank}", os.getpid())
    code = EXIT_CRASH
    try:
        code = pretrain.main(arguments)
        return code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_CRASH if end.code else EXIT_DONE
        raise
    finally:
        _write(args.state / f"exit-{rank}", code)


def _write(file: Path, number: int) -> None:
    """Whole or not at all, for a reader at any moment."""
    with replacing(file) as out:
        out.write(str(number).encode())


if __name__ == "__main__":
    sys.exit(main())
