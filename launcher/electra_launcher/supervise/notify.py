"""Run a command that the user has set (`cluster.notify`) when a run has ended or needs a person.

Guarantee: a command that fails or hangs changes neither the run nor the supervisor's exit code; the log has one line
about it.

Limits: only supervisors run the command. The supervisor of node 0 reports how the run ended; the supervisor of another
node reports only that its own node is unhealthy. If both have something to report, the command runs twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_UNHEALTHY, EXIT_USER_ERROR

TIMEOUT_S = 30.0  # after which the command is killed
# Exit code of the supervisor -> the event. A run that was stopped on purpose (75) needs no person.
EVENTS = {EXIT_DONE: "done", EXIT_UNHEALTHY: "unhealthy", EXIT_USER_ERROR: "error", EXIT_CRASH: "no_progress"}


def event_of(code: int, node: int) -> str | None:
    """Return the event, such as "done", to report when the supervisor of `node` ends with `code`; None: no event."""
    if node != 0 and code != EXIT_UNHEALTHY:
        return None
    return EVENTS.get(code)


def notify(
    command: str,
    run_dir: Path,
    event: str,
    reason: str,
    code: int,
    log: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run a shell command and pass it the event in environment variables; log one line if it fails or hangs.

    Blocks until the command ends. After `timeout_s` seconds, the command and its children are killed.
    """
    variables = {
        "ELECTRA_DIST_RUN_DIR": str(run_dir.absolute()),
        "ELECTRA_DIST_EVENT": event,
        "ELECTRA_DIST_REASON": reason,
        "ELECTRA_DIST_EXIT_CODE": str(code),
    }
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that the command and its children can be killed together
        )
    except OSError as error:
        log(f"cluster.notify cannot be started ({error.strerror}); check the command in the config")
        return
    try:
        exit_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log(f"cluster.notify did not end within {timeout_s:.0f} s and was killed; check the command in the config")
        return
    if exit_code != 0:
        log(f"cluster.notify ended with exit code {exit_code}; check the command in the config")
