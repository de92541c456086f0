"""Start the two runs of the long drill in forks of this process, so that a start takes about a second.

This process has imported torch and DeepSpeed already, so its forks need not import them.

How: the run with faults has the product's supervisor and the product's ranks. DeepSpeed's launcher, which is the
program between them, is replaced by a process that forks the ranks and waits for them. The uninterrupted run has no
supervisor.

Limits: neither run writes report.html, which the product writes whenever the ranks end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from drills.kill_matrix.short_run import fork, wait_for
from support.process_names import ProcessNames
from support.real_runs import free_port

import launcher.pretrain
import launcher.supervise.__main__
from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.run.processes import MARK
from electra_dist.train.trainer import Trainer
from launcher.chaos.drill import Drill
from launcher.supervise import rank_main
from launcher.supervise.rank_processes import RankProcesses

COMMIT_FAULT = "kill-at-commit"  # file in the run folder that makes rank 0 kill itself: "before" or "after" a commit
_SIGNALS_OF_A_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.01


class ForkedProcess:
    """Forked child of this process, with those methods of `subprocess.Popen` that the product and the drill use."""

    def __init__(self, pid: int) -> None:
        """Represent the child process `pid`, which nothing else may wait for."""
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of the process, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process does not end within `timeout` seconds; None means no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self.poll()
            if code is not None:
                return code
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_POLL_S)


class ForkedDrill(Drill):
    """Run under a supervisor that is hit by faults; all its processes are forks of this process.

    It takes the same command as `Drill`, [PYTHON, "-m", "launcher.supervise", ARGUMENTS...], and uses the arguments
    only.
    """

    names: ProcessNames  # changes what /proc shows of a fork; set it before the first drill is created

    def _start(self) -> Any:
        """Start the supervisor of the run in a forked process, and append its output to RUN_DIR.log."""
        arguments = list(self._command)[3:]

        def supervise() -> int:
            """Run the supervisor in the forked process, and return its exit code."""
            os.setsid()
            _restore_signals()
            RankProcesses.start = _start_forks  # type: ignore[method-assign]
            launcher.pretrain._write_report = lambda run_dir: None
            return launcher.supervise.__main__.main(arguments)

        return ForkedProcess(fork(supervise, self._output, {}))

    def stop(self) -> int:
        """Send SIGTERM to the supervisor, so that the run saves and stops, and return the supervisor's exit code.

        Raises:
            Stuck: the supervisor does not end within `PATIENCE_S`.
        """
        os.kill(self._supervisor.pid, signal.SIGTERM)
        return self.finish()

    def end_fault(self, kind: str) -> None:
        """Kill the run after a fault that left it stuck, and undo the fault if it lasts.

        Args:
            kind: the kind of the fault.
        """
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


def run_uninterrupted(config: Path, overrides: Sequence[str], ranks: int, last_step: int, limit_s: float) -> None:
    """Train a run from its newest checkpoint up to step `last_step` without a supervisor, save, and stop.

    Args:
        config: config file of the run. The output of the ranks is appended to the file of the same name with the
            suffix .log.
        overrides: overrides of config keys, KEY=VALUE.
        ranks: number of ranks.
        last_step: number of steps that the run has done afterwards; it must be more than the run has done before.
        limit_s: seconds after which the ranks are aborted.

    Raises:
        RuntimeError: a rank did not end with exit code 75; the message has the end of the output.
    """
    arguments = ["--config", str(config)]
    for override in overrides:
        arguments += ["--set", override]
    variables = _rank_variables(ranks, free_port())

    def train() -> int:
        """Run one rank in the forked process, and return its exit code."""
        os.setsid()  # As in the run with faults, Ctrl-C in the terminal then reaches only the drill.
        _stop_after(last_step)
        launcher.pretrain._write_report = lambda run_dir: None
        return launcher.pretrain.main(arguments)

    output = config.with_suffix(".log")
    rank_of_pid = {}
    for rank in range(ranks):
        pid = fork(train, output, {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        rank_of_pid[pid] = rank
    codes = wait_for(rank_of_pid, limit_s)
    if set(codes.values()) != {75}:
        end = output.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the uninterrupted run ended with {codes} before step {last_step}: {output}\n{end}")


def _rank_variables(ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that DeepSpeed's launcher sets equally for all ranks of a run on one node.

    Args:
        ranks: number of ranks.
        port: port on this machine at which the ranks meet.
    """
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


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


def _restore_signals() -> None:
    """Set the handlers of all signals that the drill sends to those that a newly started Python program has."""
    for number in (*_SIGNALS_OF_A_STOP, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_forks(self: RankProcesses, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the ranks in forks of this supervisor; this function replaces `RankProcesses.start`.

    A supervisor finds its processes by a variable in /proc/PID/environ (`MARK`). During the fork the supervisor itself
    shows the variable there, so that the child shows it from its first moment.

    Args:
        self: the processes of this start of the ranks.
        command: the command of DeepSpeed's launcher, from `Placement.command`; its options are used.
        environment: environment variables for the ranks.
    """
    names = ForkedDrill.names
    self.started = time.monotonic()
    mark = {MARK: self._mark}
    names.set_environment({**os.environ, **mark})
    pid = os.fork()
    if pid == 0:
        _launch(names, command, {**environment, **mark})
    names.set_environment(os.environ)
    self._launcher = ForkedProcess(pid)  # type: ignore[assignment]


def _launch(names: ProcessNames, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do what DeepSpeed's launcher does, in this forked process: fork the ranks, wait for them, and end.

    Like that launcher, the process ignores the signals that ask a run to stop.

    Args:
        names: changes the command line and the variables that /proc shows of this process and of the ranks.
        command: the command of DeepSpeed's launcher, from `Placement.command`.
        environment: environment variables for the ranks, with `MARK`.
    """
    with _end_of_process():
        os.setsid()
        _close_files()
        _restore_signals()
        for number in _SIGNALS_OF_A_STOP:
            signal.signal(number, signal.SIG_IGN)
        names.set_command("deepspeed.launcher.launch")
        ranks = int(_option(command, "--num_gpus"))
        variables = {**environment, **_rank_variables(ranks, int(_option(command, "--master_port")))}
        arguments = list(command[command.index("launcher.supervise.rank_main") + 1 :])
        os.environ.update(variables)
        for rank in range(ranks):
            rank_variables = {MARK: variables[MARK], "RANK": str(rank), "LOCAL_RANK": str(rank)}
            names.set_environment({**os.environ, **rank_variables})
            if os.fork() == 0:
                _run_rank(names, rank_variables, arguments)
        names.set_environment(os.environ)
        for _ in range(ranks):
            os.wait()
    os._exit(0)


def _run_rank(names: ProcessNames, variables: Mapping[str, str], arguments: Sequence[str]) -> NoReturn:
    """Run one rank in this forked process, and end the process with the rank's exit code, 1 after an exception.

    Args:
        names: changes the command line that /proc shows of this process.
        variables: environment variables of this rank only, with `MARK`.
        arguments: arguments of `launcher.supervise.rank_main`.
    """
    code = 1
    with _end_of_process():
        names.set_command("rank_main", "--state")
        os.environ.update(variables)
        run_dir = Path(variables[MARK].rpartition("#")[0])
        _prepare_kill_at_commit(run_dir)
        code = rank_main.main(arguments)
    os._exit(code)


@contextlib.contextmanager
def _end_of_process() -> Any:
    """Print an exception of the `with` block as a traceback instead of raising it, and flush stdout and stderr."""
    try:
        yield
    except BaseException:  # noqa: BLE001  (a fork must not return into the supervisor)
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _option(command: Sequence[str], name: str) -> str:
    """Return the word that follows the option `name` in a command.

    Raises:
        ValueError: the command does not contain the option.
    """
    return command[command.index(name) + 1]


def _close_files() -> None:
    """Close all files except stdin, stdout and stderr, as happens when a program is started.

    Otherwise this fork would keep the supervisor's locks after the supervisor has ended.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


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
