"""A run that does nothing, as the Slurm tests need it by the dozen: the ledger of a run, its signals, its exit codes.

Node 0 writes the ledger: a checkpoint every third of a second, `done` at the last step. USR1, TERM and the end of the
job, 10 s ahead, stop all nodes as real ranks stop. What else happens is said by files in RUN: `exit-NODE` holds a code
that a node ends with, once, at step 2 of a start; `crash-always` ends every start before its first checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import yaml

from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.train.stop_request import JobEndTime

STEP_S = 1 / 3
MARGIN_S = 10


def main() -> int:
    node, first = os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"] == "0"
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    run, num_steps = Path(config["run_dir"]), config["train"]["num_steps"]
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    job_end = JobEndTime().monotonic
    events = read_ledger(run)
    step = max((e.step for e in events if e.event == "checkpoint"), default=0)
    ledger = Ledger(run) if first else None
    if ledger:
        ledger.append("resume" if step else "start", step, attempt=1 + sum(e.event != "checkpoint" for e in events))
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
        left_s = float("inf") if job_end is None else job_end - time.monotonic()
        if received or left_s < MARGIN_S:
            if ledger:
                why = signal.Signals(received[0]).name if received else f"the job ends in {left_s:.0f} s"
                ledger.append("stop", step, why=why)
            return 75
    if ledger:
        ledger.append("done", step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
