"""The two runs of the long drill: one under a supervisor that is hit by faults, and one without any.

All processes are forks of this process, which has imported torch and DeepSpeed, so that a start takes about a second
(support/forked_popen.py). Supervisor and ranks are the product's.

Limits: neither run writes report.html, which the product writes whenever the ranks end.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import electra_launcher.pretrain
from drills.forks import fork_ranks, wait_for_other_threads
from electra_launcher.chaos.drill import Drill
from support.forked_popen import ForkedPopen
from support.process_names import ProcessNames

from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.run.this_node import MARK
from electra_dist.train.trainer import Trainer

COMMIT_FAULT = "kill-at-commit"  # file in the run folder that makes rank 0 kill itself: "before" or "after" a commit


def start_programs_as_forks() -> None:
    """Let Python programs that this process starts be forks of it, whose ranks may kill themselves at a commit.

    `start_again_with_room` must have started this process.
    """
    ForkedPopen.names = ProcessNames()
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    pretrain = electra_launcher.pretrain.main

    def pretrain_and_die(arguments: Sequence[str]) -> int:
        """Train as a rank of a supervisor, which gives the folder of the run in a variable."""
        if MARK in os.environ:
            _prepare_kill_at_commit(Path(os.environ[MARK].rpartition("#")[0]))
        return pretrain(arguments)

    electra_launcher.pretrain.main = pretrain_and_die  # type: ignore[assignment]


class ForkedDrill(Drill):
    """Run under a supervisor that is hit by faults, with what the long drill does between them."""

    def _start(self) -> subprocess.Popen[bytes]:
        wait_for_other_threads()  # whose locks a fork would wait for
        return super()._start()

    def stop(self) -> int:
        """Send SIGTERM to the supervisor, so that the run saves and stops, and return the supervisor's exit code."""
        os.kill(self._supervisor.pid, signal.SIGTERM)
        return self.finish()

    def end_fault(self, kind: str) -> None:
        """Kill the run after a fault that left it stuck, and undo the fault if it lasts."""
        self.close()
        (self._run_dir / COMMIT_FAULT).unlink(missing_ok=True)
        undo = self._faults[kind].undo
        if undo is not None:
            undo(self._victim())

    @property
    def step(self) -> int:
        """Number of steps that the run has done, from the last heartbeat of rank 0; 0 before the first heartbeat."""
        beat = self._beat()
        return 0 if beat is None else beat.step


def run_uninterrupted(config: Path, ranks: int, last_step: int, limit_s: float) -> None:
    """Train a run from its newest checkpoint up to step `last_step` without a supervisor, save, and stop.

    The output of the ranks is appended to the file of the config's name with the suffix .log.
    """

    def train(rank: int) -> int:
        """Run one rank in the forked process, and return its exit code."""
        os.setsid()  # As in the run with faults, Ctrl-C in the terminal then reaches only the drill.
        _stop_after(last_step)
        electra_launcher.pretrain._write_report = lambda run_dir: None
        return electra_launcher.pretrain.main(["--config", str(config)])

    output = config.with_suffix(".log")
    codes = fork_ranks(train, ranks, output, limit_s)
    if set(codes) != {75}:
        end = output.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the uninterrupted run ended with {codes} before step {last_step}: {output}\n{end}")


def _stop_after(last_step: int) -> None:
    """Make this rank send itself SIGTERM during step number `last_step`, so that the run saves and stops after it.

    It replaces `Trainer._run_step` in this process.
    """
    run_step = Trainer._run_step

    def run_step_and_stop(trainer: Trainer, step: int, *arguments: Any) -> Any:
        """Run a step; raise SIGTERM first if it is the last one. `step` is the number of steps done before."""
        if step + 1 == last_step:
            signal.raise_signal(signal.SIGTERM)
        return run_step(trainer, step, *arguments)

    Trainer._run_step = run_step_and_stop  # type: ignore[method-assign]


def _prepare_kill_at_commit(run_dir: Path) -> None:
    """Replace `os.link` so that this process kills itself when it commits a checkpoint, if the drill requests that.

    The drill requests it with the file COMMIT_FAULT in the run folder, which holds "before" or "after" and is deleted
    by the kill. A commit is the moment at which the manifest is linked into the folder of a checkpoint.
    """
    link = os.link
    request = run_dir / COMMIT_FAULT

    def link_or_die(source: Any, target: Any, **options: Any) -> None:
        """Link a file; kill this process right before or right after that, if the link is a requested commit."""
        moment = ""
        if str(target).endswith(f"/{MANIFEST}") and request.exists():
            moment = request.read_text()
            request.unlink()
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        link(source, target, **options)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    os.link = link_or_die  # type: ignore[assignment]
