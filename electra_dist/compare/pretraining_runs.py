"""Make the pretraining runs of a comparison, each with a supervisor process of its own, as an ordinary run has.

Guarantee: a run that crashes does not end any other run. A run counts as finished if the checkpoint of its last step
is complete, whatever its exit code. If an earlier comparison was killed and its run still trains, this run is waited
for, not started twice. After Ctrl-C, the ranks of the runs that this comparison has started save a checkpoint and end;
the next start continues from it. A run that an earlier comparison has started goes on.

How: a run is started by `python -m electra_launcher.supervise`, which starts the ranks and watches them, with the YAML
file of the run. A user can run the same command. Its output is appended to RUN.log. Progress is read from the
heartbeat files, in which the ranks record their step.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from electra_dist.checkpoint.stored_copies import checkpoints, open_targets
from electra_dist.compare.comparison_plan import PlannedRun
from electra_dist.finetune.training_loop import Progress
from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.this_node import mark_of, marked_pids

_POLL_S = 0.5  # seconds between checks of a run


def saved_steps(run: PlannedRun) -> set[int]:
    """Return the steps at which a run has a complete checkpoint in at least one of its checkpoint stores."""
    return {checkpoint.step for checkpoint in checkpoints(open_targets(run.config))}


class Pretrainings:
    """Context manager that trains the runs of a comparison, at most `parallel` of them at the same time.

    Call `result` for one run after the other. While `result` waits for a run, the next runs train beside it.
    """

    def __init__(self, runs: Sequence[PlannedRun], ranks: int, parallel: int) -> None:
        self._runs = runs
        self._ranks = ranks
        self._parallel = parallel
        self._pool = ThreadPoolExecutor(parallel)
        self._stop = threading.Event()
        self._started: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the runs that this pool has started, and wait until their ranks have saved a checkpoint and ended."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def result(self, run: PlannedRun, progress: Progress) -> str:
        """Start a run if necessary, and wait until it ends; return "" if it is finished, else the reason in one line.

        `progress` is called every half second. Raises OSError if the supervisor cannot be started, or its log cannot
        be written.
        """
        self._start(run)
        training = self._started[run.name]
        while not training.done():
            self._start_runs_beside(run)
            progress("pretraining", current_step(run), run.marks[-1])
            wait([training], timeout=_POLL_S)
        return training.result()

    def _start_runs_beside(self, run: PlannedRun) -> None:
        """Start further runs, in their order, until `parallel - 1` of them train beside `run`, or none is left."""
        for next_run in self._runs:
            num_beside = sum(not training.done() for name, training in self._started.items() if name != run.name)
            if num_beside >= self._parallel - 1:
                return
            self._start(next_run)

    def _start(self, run: PlannedRun) -> None:
        if run.name not in self._started:
            self._started[run.name] = self._pool.submit(pretrain, run, self._ranks, self._pause)

    def _pause(self) -> None:
        """Sleep for half a second; raise _StoppedError as soon as the `with` block has ended."""
        if self._stop.wait(_POLL_S):
            raise _StoppedError


def pretrain(run: PlannedRun, ranks: int, pause: Callable[[], None]) -> str:
    """Start or continue a run, and wait until it ends; return "" if it is finished, else the reason in one line.

    If an earlier comparison has started the run and it still trains, it is not started again. `pause` is called
    between checks. If `pause` raises, a run that this call has started saves a checkpoint and ends, and the exception
    passes on.
    """
    last_step = run.marks[-1]
    # The value of an environment variable by which the run's processes on this machine are found.
    process_mark = mark_of(Path(run.config.run_dir), node=0)
    exit_code: int | None = None  # of the supervisor that this call has started
    log = _log_file(run)
    log_begin = 0  # bytes in the log before that supervisor was started; earlier starts have written them
    while last_step not in saved_steps(run):
        is_running = bool(marked_pids(process_mark))
        if is_running:
            pause()  # an earlier, interrupted comparison has started the run, which still trains
        elif exit_code is None:
            log_begin = log.stat().st_size if log.exists() else 0
            exit_code = _supervise(run, ranks, pause)
        else:
            return (
                f"the run ended with exit code {exit_code}: {_last_error(log, log_begin)}; "
                f"read {log}, correct the cause and repeat the command"
            )
    return ""


class _StoppedError(Exception):
    """Error: the pool of runs was closed, for example by Ctrl-C, so the runs that still train must be stopped."""


def current_step(run: PlannedRun) -> int:
    """Return the optimizer step that rank 0 has recorded in its heartbeat file; 0 if there is none yet."""
    for beat in read_heartbeats(Path(run.config.run_dir)):
        if beat.rank == 0:
            return beat.step
    return 0


def _supervise(run: PlannedRun, ranks: int, pause: Callable[[], None]) -> int:
    """Run the supervisor of a run; return its exit code. If `pause` raises, the ranks save a checkpoint and end."""
    command = [
        sys.executable,
        "-m",
        "electra_launcher.supervise",
        "--config",
        str(run.file),
        "--gpus-per-node",
        str(ranks),
    ]
    with _log_file(run).open("ab") as log:
        # In a session of its own, the supervisor does not receive Ctrl-C from the terminal directly.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            pause()
    finally:
        process.terminate()  # no effect if the process has ended; otherwise its ranks save a checkpoint and end
        process.wait()
    return process.returncode


def _log_file(run: PlannedRun) -> Path:
    return Path(f"{run.config.run_dir}.log")


def _last_error(log: Path, begin: int) -> str:
    """Return the last line of a log that starts with "error: ", or else its last; skip the first `begin` bytes."""
    last_line = "it has written nothing to the log"
    last_error = ""
    for line in log.read_bytes()[begin:].decode(errors="replace").splitlines():
        text = line.strip()
        if text:
            last_line = text
        if text.startswith("error: "):
            last_error = text
    return last_error or last_line
