"""Starts a supervisor as a user does, reads its log, and finds its processes by their mark."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.ledger import LedgerEvent, read_ledger
from electra_dist.run.this_node import mark_of, marked_pids

FAKE = [sys.executable, str(Path(__file__).parents[1] / "launcher" / "supervise" / "fake_supervise.py")]
REAL = [sys.executable, "-m", "electra_launcher.supervise"]


class Supervised:
    """A run under a supervisor that a test has started."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes], node: int, output: Path) -> None:
        self.run_dir, self.process, self.node, self.output = run_dir, process, node, output

    def log(self) -> list[str]:
        """Return the lines of the supervisor's log so far."""
        file = self.run_dir / f"supervise-{self.node}.log"
        return file.read_text().splitlines() if file.exists() else []

    def logged(self, pattern: str, after: float = 0.0) -> float | None:
        """Return the Unix time of the first log line since `after` that matches `pattern`, or None."""
        for line in self.log():
            time_text, _, text = line.partition(" ")
            at = datetime.fromisoformat(time_text).timestamp()
            if at >= after and re.search(pattern, text):
                return at
        return None

    def wait(self, condition: Callable[[], Any], timeout_s: float = 180.0) -> Any:
        """Wait until `condition` returns a true value and return it; fail if the supervisor ends or time runs out."""
        deadline = time.monotonic() + timeout_s
        result = condition()
        while not result:
            assert self.process.poll() is None or condition(), f"ended early\n{self.story()}"
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.01)
            result = condition()
        return result

    def wait_for_step(self, step: int, attempt: int = 1, ranks: int = 2) -> None:
        """Wait until `ranks` ranks have reached `step` in `attempt` or a later one, by their heartbeats."""
        self.wait(lambda: sum(b.step >= step and b.attempt >= attempt for b in read_heartbeats(self.run_dir)) == ranks)

    def end(self, timeout_s: float = 120.0) -> int:
        """Wait for the supervisor to end and return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def rank_pid(self, rank: int) -> int:
        """Return the process id of a rank, by its heartbeat."""
        return next(beat.pid for beat in read_heartbeats(self.run_dir) if beat.rank == rank)

    def pids(self, words: str = "") -> list[int]:
        """Return the processes started by the supervisor whose command line contains `words`."""
        found = []
        for pid in marked_pids(mark_of(self.run_dir, self.node)):
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(pid)
        return found

    def events(self, name: str) -> list[LedgerEvent]:
        """Return the events `name` of the run's ledger."""
        return [event for event in read_ledger(self.run_dir) if event.event == name]

    def starts(self) -> int:
        """Return how often ranks were started, from the log: a rank may crash before rank 0 writes to the ledger."""
        return sum("starting ranks" in line for line in self.log())

    def story(self) -> str:
        """Return the log and the end of the output, for the message of a failed assertion."""
        return "\n".join([*self.log(), self.output.read_text(errors="replace")[-6000:]])


@contextlib.contextmanager
def supervised(command: list[str], config: Path, run_dir: Path, *options: str, node: int = 0) -> Iterator[Supervised]:
    """Start a supervisor by `command`; its remaining processes are killed at the end of the block."""
    output = run_dir.with_name(f"{run_dir.name}-{node}.out")
    with output.open("ab") as out:
        process = subprocess.Popen(
            [*command, "--config", str(config), *options], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Supervised(run_dir, process, node, output)
    finally:
        process.kill()
        process.wait()
        for pid in marked_pids(mark_of(run_dir, node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
