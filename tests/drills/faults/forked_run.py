"""Runs whose processes are forks of this one, which has imported torch and DeepSpeed: a start takes about a second.

A run with faults has a supervisor of the product and ranks of the product. Only the program between them, DeepSpeed's
launcher, is replaced: by a process that forks the ranks and waits for them. The uninterrupted run has no supervisor.
report.html, which the end of a start writes, is left out in both.
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

from drills.faults.process_names import ProcessNames
from drills.kill_matrix.short_run import fork, wait_for
from support.real_runs import free_port

import launcher.pretrain
import launcher.supervise.__main__
from electra_dist.checkpoint.checkpoint_manifest import MANIFEST
from electra_dist.run.marked_processes import MARK
from electra_dist.train.trainer import Trainer
from launcher.chaos.drill import Drill
from launcher.supervise import rank_main
from launcher.supervise.rank_processes import RankProcesses

COMMIT_FAULT = "kill-at-commit"  # file in the run folder; its content is "before" or "after"
_SIGNALS_OF_A_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.01


class ForkedProcess:
    """A child of this process, with those methods of `subprocess.Popen` that the product and the drill use."""

    def __init__(self, pid: int) -> None:
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
        """Wait for the end of the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it does not end within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


class ForkedDrill(Drill):
    """A run under a supervisor that is hit by faults, all of whose processes are forks of this process.

    The command is the one of `Drill`: Python, `-m launcher.supervise`, and its arguments.
    """

    names: ProcessNames  # of this program; set before the first drill is created

    def _start(self) -> Any:
        """Start the supervisor of the run in a fork, and append its output to RUN_DIR.log."""
        arguments = list(self._command)[3:]

        def supervise() -> int:
            os.setsid()
            _restore_signals()
            RankProcesses.start = _start_forks  # type: ignore[method-assign]
            launcher.pretrain._write_report = lambda run_dir: None
            return launcher.supervise.__main__.main(arguments)

        return ForkedProcess(fork(supervise, self._output, {}))

    def stop(self) -> int:
        """Let the run save and stop, as after SIGTERM; return the supervisor's exit code.

        Raises:
            Stuck: the supervisor does not end.
        """
        os.kill(self._supervisor.pid, signal.SIGTERM)
        return self.finish()

    def end_fault(self, kind: str) -> None:
        """End a fault that would last, after which the run got stuck; the run is killed first."""
        self.close()
        (self._run_dir / COMMIT_FAULT).unlink(missing_ok=True)
        undo = self._faults[kind].undo
        if undo is not None:
            undo(self._victim())

    @property
    def step(self) -> int:
        """The number of steps that the run has done, by the last heartbeat of rank 0."""
        beat = self._beat()
        return 0 if beat is None else beat.step


def run_uninterrupted(config: Path, overrides: Sequence[str], ranks: int, last_step: int, limit_s: float) -> None:
    """Train from the newest checkpoint until `last_step`, save, and stop.

    Args:
        config: config file of the run; the output of its ranks is appended to the file with the suffix .log.
        overrides: overrides of config keys, KEY=VALUE.
        ranks: number of ranks.
        last_step: steps that the run has done afterwards; more than it has done before.
        limit_s: seconds after which the ranks are aborted.
    """
    arguments = ["--config", str(config)]
    for override in overrides:
        arguments += ["--set", override]
    variables = _rank_variables(ranks, free_port())

    def train() -> int:
        os.setsid()  # as the run with faults: Ctrl-C in the terminal reaches only the drill
        _stop_after(last_step)
        launcher.pretrain._write_report = lambda run_dir: None
        return launcher.pretrain.main(arguments)

    output = config.with_suffix(".log")
    pids = {fork(train, output, {**variables, "RANK": str(n), "LOCAL_RANK": str(n)}): n for n in range(ranks)}
    codes = wait_for(pids, limit_s)
    if set(codes.values()) != {75}:
        end = output.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the uninterrupted run ended with {codes} before step {last_step}: {output}\n{end}")


def _rank_variables(ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that DeepSpeed's launcher sets for all ranks of one node."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _stop_after(last_step: int) -> None:
    """Let this rank receive SIGTERM when it begins the last of so many steps, so that the run stops after it."""
    run_step = Trainer._run_step

    def stopping(trainer: Trainer, step: int, *arguments: Any) -> Any:
        if step + 1 == last_step:
            signal.raise_signal(signal.SIGTERM)
        return run_step(trainer, step, *arguments)

    Trainer._run_step = stopping  # type: ignore[method-assign]


def _restore_signals() -> None:
    """Give the signals the handlers that a program has when it is started."""
    for number in (*_SIGNALS_OF_A_STOP, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_forks(self: RankProcesses, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the ranks as forks of this supervisor; takes the place of `RankProcesses.start`.

    The supervisor shows the mark of its processes while it forks, so that they have it from their beginning.
    """
    names = ForkedDrill.names
    self.started = time.monotonic()
    mark = {MARK: self._mark}
    names.set_variables(mark)
    pid = os.fork()
    if pid == 0:
        _launch(names, command, {**environment, **mark})
    names.set_variables({})
    self._launcher = ForkedProcess(pid)  # type: ignore[assignment]


def _launch(names: ProcessNames, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Fork the ranks that a command of `Placement.command` starts, and wait for them; the process then ends."""
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
            own = {MARK: variables[MARK], "RANK": str(rank), "LOCAL_RANK": str(rank)}
            names.set_variables(own)
            if os.fork() == 0:
                _run_rank(names, own, arguments)
        names.set_variables({MARK: variables[MARK]})
        for _ in range(ranks):
            os.wait()
    os._exit(0)


def _run_rank(names: ProcessNames, variables: Mapping[str, str], arguments: Sequence[str]) -> NoReturn:
    """Run one rank in this process, which then ends with its exit code."""
    code = 1
    with _end_of_process():
        names.set_command("rank_main", "--state")
        os.environ.update(variables)
        run_dir = Path(variables[MARK].rpartition("#")[0])
        _await_kill_at_commit(run_dir)
        code = rank_main.main(arguments)
    os._exit(code)


@contextlib.contextmanager
def _end_of_process() -> Any:
    """Print an exception as a traceback, and flush the output; nothing leaves this block as an exception."""
    try:
        yield
    except BaseException:  # noqa: BLE001  (a fork must not return into the supervisor)
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _option(command: Sequence[str], name: str) -> str:
    """Return the value of an option of a command."""
    return command[command.index(name) + 1]


def _close_files() -> None:
    """Close all files but stdin, stdout and stderr, as a new program does: among them the supervisor's locks."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _await_kill_at_commit(run_dir: Path) -> None:
    """Kill this process at its next commit of a checkpoint, right before or after it, if the drill has asked for it.

    The file COMMIT_FAULT in the run folder asks for it. A commit links the manifest into the folder of a checkpoint.
    """
    link = os.link
    request = run_dir / COMMIT_FAULT

    def linking(source: Any, target: Any, **options: Any) -> None:
        moment = ""
        if str(target).endswith(f"/{MANIFEST}") and request.exists():
            moment = request.read_text()
            request.unlink()
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        link(source, target, **options)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    os.link = linking  # type: ignore[assignment]
