"""Write the log of a node's supervisor, RUN/supervise-K.log, and the same lines to stdout."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.escapes import printable
from electra_dist.run.folder import supervise_log
from electra_dist.store.atomic_files import writable


class Log:
    """Log of one supervisor. Calling the object with a text writes the text to stdout and RUN/supervise-NODE.log."""

    def __init__(self, run_dir: Path, node: int) -> None:
        path = supervise_log(run_dir, node)
        with writable(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def __call__(self, text: str) -> None:
        """Write a line to stdout and, with the UTC time in front, to the log file. A full disk raises no exception."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(printable(f"supervise: {text}"), flush=True)
        try:
            os.write(self._file, f"{now} {printable(text)}\n".encode())
        except OSError as error:  # The supervisor must keep watching its ranks when the disk is full.
            print(
                printable(
                    f"supervise: the log file cannot be written ({error.strerror}); free space in the run folder"
                ),
                flush=True,
            )
