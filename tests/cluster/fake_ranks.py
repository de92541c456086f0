"""A run that does nothing, as the Slurm tests need it by the dozen: the ledger of a run, its signals, its exit codes.

Node 0 writes the ledger: a checkpoint every third of a second, `done` at the last step. USR1 and TERM stop all nodes
as real ranks stop. What else happens is said by files in RUN: `exit-NODE` holds a code that a node ends with, once,
at step 2 of a start; `crash-always` ends every start before its first checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import yaml

from electra_dist.run.ledger import Ledger, read_ledger

STEP_S = 1 / 3


def main() -> int:
    node, first = os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"] == "0"
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    run, num_steps = Path(config["run_dir"]), config["train"]["num_steps"]
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    events = read_ledger(run)
    step = max((e["step"] for e in events if e["event"] == "checkpoint"), default=0)
    ledger = Ledger(run) if first else None
    if ledger:
        ledger.append("resume" if step else "start", step, attempt=1 + sum(e["event"] != "checkpoint" for e in events))
    begin, others_gone = step, len(list(run.glob("exited-*")))
    while step < num_steps:
        time.sleep(STEP_S)
        if (run / "crash-always").exists():
            return 1
        if (run / f"exit-{node}").exists() and step >= begin + 2:
            return int((run / f"exit-{node}").rename(run / f"exited-{node}").read_text())
        if len(list(run.glob("exited-*"))) > others_gone:
            return 1  # as ranks end whose peer is gone
        step += 1
        if ledger:
            ledger.append("checkpoint", step)
        if received:
            if ledger:
                ledger.append("stop", step, why=signal.Signals(received[0]).name)
            return 75
    if ledger:
        ledger.append("done", step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
