"""Start a run of a case in forks of this process, and end it where the case says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import electra_launcher.cli.main
import electra_launcher.pretrain
from deepspeed.accelerator import get_accelerator
from drills.campaign.cases import Interruption
from drills.forks import fork, fork_ranks, wait_for
from drills.kill_matrix.durable_operations import Moment, OperationLog

from electra_dist.engine import zero
from electra_dist.run.folder import SAVE_FILE, STOP_FILE
from electra_dist.train.guard import Guard
from electra_dist.train.trainer import Trainer

LIMIT_S = 300.0  # for one start, on a busy machine
OVERFLOWING_SCALE = 2.0**24  # at which the gradients of tiny runs overflow fp16


class CountedChanges(OperationLog):
    """Log of a process's changes of files that kills the process at the n-th one after it was armed."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Begin to intercept the changes below a folder."""
        super().__init__(folder, "", "", rank, None)
        self._num_left = 0
        self._moment: Any = None

    def arm(self, interruption: Interruption) -> None:
        """Kill this process at the change that an interruption names, counted from now on."""
        self._moment = interruption.moment
        self._num_left = interruption.change

    def _number(self, kind: str, file: str, num_bytes: int) -> Moment | None:
        super()._number(kind, file, num_bytes)
        with self._lock:
            self._num_left -= 1
            if self._num_left != 0:
                return None
        if self._moment == "torn" and num_bytes < 2:
            return "before"
        return self._moment


def start(
    config: Path,
    watched: Path,
    ranks: int,
    output: Path,
    interruption: Interruption | None = None,
    spikes: Sequence[int] = (),
    from_scratch: bool = False,
    first_loss_scale: float = OVERFLOWING_SCALE,
) -> list[int]:
    """Start a run, and return the exit codes of its ranks; negative: the signal that ended one.

    Args:
        config: the file of the config.
        watched: folder below which the run changes files.
        ranks: number of ranks.
        output: file for what the ranks print.
        interruption: what ends it; None: nothing.
        spikes: steps that the guard takes for spikes.
        from_scratch: whether the run begins again.
        first_loss_scale: scale of the loss in fp16 with which the run begins.
    """

    def rank_main(rank: int) -> int:
        hit = interruption if interruption is not None and interruption.rank == rank else None
        _prepare_process(hit, watched, rank, frozenset(spikes), first_loss_scale)
        return electra_launcher.pretrain.main(["--config", str(config), *["--from-scratch"] * from_scratch])

    return fork_ranks(rank_main, ranks, output, LIMIT_S)


def run_command(arguments: Sequence[str], output: Path) -> int:
    """Run an `electra-dist` command in a fork, and return its exit code."""

    def main() -> int:
        sys.argv[1:] = arguments
        try:
            return electra_launcher.cli.main.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0

    return wait_for({fork(main, output, {}): 0}, LIMIT_S)[0]


def _prepare_process(
    hit: Interruption | None, watched: Path, rank: int, spikes: frozenset[int], first_loss_scale: float
) -> None:
    """Let this rank meet its interruption and the spikes; allow fp16, which torch computes on every CPU.

    The loss scale of fp16 grows so soon that some steps overflow.
    """
    get_accelerator().is_fp16_supported = lambda: True
    zero.INITIAL_SCALE, zero.STEPS_UNTIL_GROWTH = first_loss_scale, 3
    electra_launcher.pretrain._write_report = lambda run_dir: None
    changes = CountedChanges(watched, rank) if hit is not None and hit.kind == "kill at a change" else None
    pending = [hit] if hit is not None else []
    present_step = -1
    run_step = Trainer._run_step
    find_fault = Guard.fault

    def meet(trainer: Trainer | None) -> None:
        interruption = pending.pop()
        if changes is not None:
            changes.arm(interruption)
        elif interruption.delay_s:
            threading.Thread(target=_send_later, args=(interruption,), daemon=True).start()
        elif interruption.kind in ("stop file", "save file"):
            assert trainer is not None
            name = STOP_FILE if interruption.kind == "stop file" else SAVE_FILE
            (Path(trainer.config.run_dir) / name).touch()
        else:
            signal.raise_signal(interruption.signal)

    def run_step_and_meet(trainer: Trainer, step: int, *arguments: Any) -> Any:
        nonlocal present_step
        present_step = step
        if pending and step >= pending[0].step:
            meet(trainer)
        return run_step(trainer, step, *arguments)

    def find_fault_or_spike(guard: Guard, loss: float) -> str:
        return "a spike of the campaign" if present_step in spikes else find_fault(guard, loss)

    Trainer._run_step = run_step_and_meet  # type: ignore[method-assign]
    Guard.fault = find_fault_or_spike  # type: ignore[method-assign]
    if pending and pending[0].step < 0:
        meet(None)


def _send_later(interruption: Interruption) -> None:
    """Send the signal of an interruption to this process after its delay."""
    time.sleep(interruption.delay_s)
    os.kill(os.getpid(), interruption.signal)
