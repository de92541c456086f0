"""Fake rank: real signal handlers, heartbeats, ledger and exit codes, but no training and no torch.

Every step takes STEP_S seconds. A rank that receives a stop request passes it to the others by a file, and the death
of one rank crashes the others; real ranks do both through an all-reduce. Files in the run folder cause faults:

    crash        every start crashes without a word
    bug          rank 1 fails at step 7: with `module` in the file it imports one that does not exist, with `kill` or
                 `term` it gets SIGKILL or SIGTERM, and any other text is that of a ValueError
    exit-R       rank R ends with the exit code in this file, and prints the line after it to stderr
    away-R       rank R ends with 75 before its training begins, as one whose storage is away
    deaf         ranks ignore stop requests
    chatty       ranks print a line at each step
    linger       processes stay alive after their training has ended
    slow-start   seconds until the signal handlers are installed, as imports take

A file `devices` in the run folder makes each rank R write the CUDA_VISIBLE_DEVICES that it has to `devices-R`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from electra_launcher import pretrain
from electra_launcher.entry import end_process_with
from electra_launcher.supervise import rank_main

from electra_dist.config.load import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED
from electra_dist.run.heartbeat import Heartbeat, read_heartbeats
from electra_dist.run.history import newest_checkpoint
from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.run.this_node import is_alive
from electra_dist.train.stop_request import StopRequest

STEP_S = 0.05
SAVE_EVERY = 5
BUG_STEP = 7


def train(arguments: list[str]) -> int:
    """Stand in for the main of pretrain.py: make steps until the end, a stop or a fault; return the exit code."""
    rank = int(os.environ["RANK"])
    config = load_config(arguments[arguments.index("--config") + 1])
    run = Path(config.run_dir)
    if (run / "devices").exists():
        (run / f"devices-{rank}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
    if (run / f"away-{rank}").exists():
        return EXIT_STOPPED
    if (run / "slow-start").exists():
        time.sleep(float((run / "slow-start").read_text()))
    stop = StopRequest(run, rank == 0)
    step = newest_checkpoint(read_ledger(run))
    attempt = json.loads((run / "meeting" / "node-0.json").read_text())["start"]  # equal on all ranks
    # The file has the attempt in its name, because a rank may make its first step before another has started.
    stop_file = run / f"stop-request-{attempt}"
    ledger = Ledger(run) if rank == 0 else None
    if ledger:
        ledger.append("resume" if step else "start", step, attempt=attempt)
    pulse = Heartbeat(run, rank, attempt)
    while step < config.train.num_steps:
        pulse.beat("step", step)
        time.sleep(STEP_S)
        # A rank may write its last heartbeat and end between a look at the heartbeats and one at the processes.
        if _has_lost_rank(run, attempt) and _has_lost_rank(run, attempt):
            raise RuntimeError("connection reset by peer")
        if (run / "chatty").exists():
            print(f"step {step}", flush=True)
        if (run / "crash").exists():
            return EXIT_CRASH
        if (run / "bug").exists() and step == BUG_STEP:
            if rank == 1:
                _fail((run / "bug").read_text())
            _await_loss(run, attempt)
        if (run / f"exit-{rank}").exists():
            code, _, line = (run / f"exit-{rank}").read_text().partition(" ")
            print(line, end="", file=sys.stderr, flush=True)
            return int(code)
        step += 1
        if stop.wants_stop():
            unfinished = stop_file.with_name(f"{stop_file.name}-of-{rank}")
            unfinished.write_text(stop.reason)
            unfinished.replace(stop_file)  # no other rank finds it empty
        stops = stop_file.exists() and not (run / "deaf").exists()
        if ledger and (stops or step % SAVE_EVERY == 0):
            ledger.append("checkpoint", step, attempt=attempt)
        if stops:
            if ledger:
                _await_others(run, attempt)
                ledger.append("stop", step, why=stop_file.read_text())
            pulse.close()
            return EXIT_STOPPED
    if ledger:
        _await_others(run, attempt)
        ledger.append("done", step)
    pulse.close()
    if (run / "linger").exists():
        time.sleep(60.0)
    return EXIT_DONE


def _fail(how: str) -> None:
    if how == "module":
        import_module("no_such_module_anywhere")
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(how)
    if number is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(60.0)
    raise ValueError(how)


def _await_loss(run: Path, attempt: int) -> None:
    """Wait for the loss of another rank, as a real rank does in the all-reduce of the step."""
    deadline = time.monotonic() + 60
    while not _has_lost_rank(run, attempt) and (run / "bug").exists() and time.monotonic() < deadline:
        time.sleep(STEP_S)


def _has_lost_rank(run: Path, attempt: int) -> bool:
    return any(b.attempt == attempt and b.phase != "done" and not is_alive(b.pid) for b in read_heartbeats(run))


def _await_others(run: Path, attempt: int) -> None:
    """Wait until all ranks have begun: a real rank 0, which exchanges gradients with them, cannot end earlier."""
    deadline = time.monotonic() + 30
    while len({beat.rank for beat in read_heartbeats(run) if beat.attempt == attempt}) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > deadline:
            raise RuntimeError("timed out while waiting for the other ranks")
        time.sleep(STEP_S)


if __name__ == "__main__":
    pretrain.main = train  # type: ignore[assignment]
    end_process_with(rank_main.main)
