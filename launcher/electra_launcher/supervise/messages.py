"""Tell people what a supervisor decides: a line in its log, and at its end the user's command `cluster.notify`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_UNHEALTHY, EXIT_USER_ERROR
from electra_dist.escapes import printable
from electra_dist.run.folder import supervise_log
from electra_dist.store.atomic_files import writable
from electra_dist.store.patience import Patience, waits

_LIMIT_S = 30.0  # after which the command is killed
# Exit code of the supervisor -> the event. A run that was stopped on purpose (75) needs no person.
_EVENTS = {EXIT_DONE: "done", EXIT_UNHEALTHY: "unhealthy", EXIT_USER_ERROR: "error", EXIT_CRASH: "no_progress"}


class Log:
    """Log of one supervisor. Calling the object with a text writes the text to stdout and RUN/supervise-NODE.log."""

    def __init__(self, run_dir: Path, node: int, patience: Patience | None = None) -> None:
        self.patience = patience
        self._file = self._open(supervise_log(run_dir, node))

    @waits
    def _open(self, path: Path) -> int:
        with writable(path):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def __call__(self, text: str, quoted: str = "") -> None:
        """Write a line to stdout and, with the UTC time in front, to the log file. A full disk raises no exception.

        `quoted` is what a rank has written to stderr. It ends the line, but on a stdout that is the same terminal or
        file as stderr it would stand twice, and is left out.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        whole = f"{text}: {quoted}" if quoted else text
        shown = text if quoted and _stdout_is_stderr() else whole
        print(printable(f"supervise: {shown}"), flush=True)
        try:
            os.write(self._file, f"{now} {printable(whole)}\n".encode())
        except OSError as error:  # The supervisor must keep watching its ranks when the disk is full.
            problem = f"the log file cannot be written ({error.strerror}); free space in the run folder"
            print(printable(f"supervise: {problem}"), flush=True)


def _stdout_is_stderr() -> bool:
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one of them is closed
        return False


def event_of(code: int, node: int) -> str | None:
    """Return the event, such as "done", to report when the supervisor of `node` ends with `code`, or None.

    Node 0 reports how the run ended, another node only that it is unhealthy. If both report, the user's command runs
    twice.
    """
    if node != 0 and code != EXIT_UNHEALTHY:
        return None
    return _EVENTS.get(code)


def notify(
    command: str,
    run_dir: Path,
    event: str,
    reason: str,
    code: int,
    log: Callable[[str], None],
    timeout_s: float = _LIMIT_S,
) -> None:
    """Run the user's command with the event in environment variables; log one line if it fails or hangs.

    Blocks until the command ends. After `timeout_s` seconds, the command and its children are killed. Whatever it
    does, the run and the supervisor's exit code stay as they are.
    """
    variables = {
        "ELECTRA_DIST_RUN_DIR": str(run_dir.absolute()),
        "ELECTRA_DIST_EVENT": event,
        "ELECTRA_DIST_REASON": reason,
        "ELECTRA_DIST_EXIT_CODE": str(code),
    }
    problem = _run(command, os.environ | variables, timeout_s)
    if problem:
        log(f"cluster.notify {problem}; check the command in the config")


def _run(command: str, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run a shell command; return why it failed, or "". It is killed, with its children, after `timeout_s` seconds."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that the command and its children can be killed together
        )
    except OSError as error:
        return f"cannot be started ({error.strerror})"
    try:
        exit_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"did not end within {timeout_s:.0f} s and was killed"
    return f"ended with exit code {exit_code}" if exit_code != 0 else ""
