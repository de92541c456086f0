"""A rank whose training is make-believe: the real signals, heartbeats, ledger and exit codes, and no torch.

Every step takes STEP_S. A told rank tells the others by a file, and one that is gone crashes the others, as real
ranks do by an all-reduce. What goes wrong is said by files in RUN: `crash` crashes every start, `exit-R` holds a code
that rank R ends with, `deaf` makes ranks ignore being told, `linger` keeps their processes after their exit code,
`slow-start` holds seconds before the handlers are installed, as imports take.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_DONE, EXIT_STOPPED
from electra_dist.run.heartbeat import Heartbeat, read_heartbeats
from electra_dist.run.ledger import Ledger, newest_checkpoint, read_ledger
from electra_dist.run.processes import is_alive
from electra_dist.train.health.stop_request import StopRequest
from launcher import pretrain
from launcher.supervise import rank_main

STEP_S = 0.05
SAVE_EVERY = 5


def train(arguments: list[str]) -> int:
    rank = int(os.environ["RANK"])
    config = load_config(arguments[arguments.index("--config") + 1])
    run = Path(config.run_dir)
    if (run / "slow-start").exists():
        time.sleep(float((run / "slow-start").read_text()))
    if (run / "linger").exists():
        atexit.register(time.sleep, 60.0)
    stop = StopRequest(run, rank == 0)
    step = newest_checkpoint(read_ledger(run))
    attempt = max(int(file.stem[-6:]) for file in (run / "meeting").glob("start-*.json"))  # the same for all ranks
    told = run / f"told-{attempt}"  # of this start only: a rank may be at its first step before another starts
    ledger = Ledger(run) if rank == 0 else None
    if ledger:
        ledger.append("resume" if step else "start", step, attempt=attempt)
    pulse = Heartbeat(run, rank, attempt)
    while step < config.train.num_steps:
        pulse.beat("step", step)
        time.sleep(STEP_S)
        if any(b.attempt == attempt and b.phase != "done" and not is_alive(b.pid) for b in read_heartbeats(run)):
            raise RuntimeError("connection reset by peer")
        if (run / "crash").exists():
            raise RuntimeError("a crash before the first checkpoint")
        if (run / f"exit-{rank}").exists():
            return int((run / f"exit-{rank}").read_text())
        step += 1
        if stop.wants_stop():
            told.write_text(stop.reason)
        stops = told.exists() and not (run / "deaf").exists()
        if ledger and (stops or step % SAVE_EVERY == 0):
            ledger.append("checkpoint", step, attempt=attempt)
        if stops:
            if ledger:
                ledger.append("stop", step, why=told.read_text())
            pulse.close()
            return EXIT_STOPPED
    if ledger:
        ledger.append("done", step)
    pulse.close()
    return EXIT_DONE


if __name__ == "__main__":
    pretrain.main = train  # type: ignore[assignment]
    sys.exit(rank_main.main())
