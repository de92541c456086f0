"""One start of real training through the deepspeed launcher, its records, and the comparison of two runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
COMPARED = ("loss", "mlm_loss", "rtd_loss", "grad_norm")
POLL_S = 0.1
Json = dict[str, Any]


class OutOfTime(Exception):
    """The time limit was reached."""


class Training:
    """One start of `deepspeed launcher/pretrain.py` on one rank, in a process group of its own."""

    def __init__(
        self, config: Path, run_dir: Path, overrides: Sequence[str], deadline: float, *, to_console: bool = False
    ) -> None:
        """Start the processes; their output is appended to RUN.log beside the run folder.

        Args:
            config: YAML file.
            run_dir: Run folder.
            overrides: KEY=VALUE settings.
            deadline: `time.monotonic()` at which waiting ends.
            to_console: whether the output goes to this process's console, not into the file.
        """
        self.run_dir = run_dir
        self.deadline = deadline
        self.log = run_dir.with_suffix(".log")
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
        command += ["--master_port", str(_free_port()), "launcher/pretrain.py", "--config", str(config)]
        for setting in [f"run_dir={run_dir}", *overrides]:
            command += ["--set", setting]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=None if to_console else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, *, until_step: int | None = None) -> int | None:
        """Wait until the processes ended, or until a step was logged and some checkpoint is complete.

        Returns:
            The exit code, or None if the step and the checkpoint came first.

        Raises:
            OutOfTime: the time limit came first; the processes were killed.
        """
        while (code := self.process.poll()) is None:
            if until_step is not None and self._has_saved_and_reached(until_step):
                return None
            if time.monotonic() > self.deadline:
                self.kill()
                raise OutOfTime(f"{self.run_dir.name} was not finished; the end of its log:\n{self.tail()}")
            time.sleep(POLL_S)
        return code

    def _has_saved_and_reached(self, step: int) -> bool:
        """Return whether the run has logged a step, and has a complete checkpoint, which a thread writes meanwhile."""
        events = {event["event"] for event in read_lines(self.run_dir / "ledger.jsonl")}
        return "checkpoint" in events and max(metrics(self.run_dir), default=0) >= step

    def kill(self) -> None:
        """Kill the launcher and the rank with SIGKILL, at once, and wait for the launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> None:
        """Wait for the end of the run.

        Raises:
            OutOfTime: as `wait`.
            SystemExit: the run failed.
        """
        code = self.wait()
        if code:
            sys.exit(f"training ended with exit code {code}; the end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        """Return the last 25 lines of the output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def _free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_lines(path: Path) -> list[Json]:
    """Return the objects of a JSON-lines file; [] if it does not exist. An unfinished last line is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def metrics(run_dir: Path) -> dict[int, Json]:
    """Return the logged steps of a run by number."""
    return {record["step"]: record for record in read_lines(run_dir / "metrics.jsonl") if record["kind"] == "train"}


def compare(whole: dict[int, Json], killed: dict[int, Json]) -> Json:
    """Compare the logged steps of two runs.

    Returns:
        `steps`, how many both have; `same_rows`, whether they read the same rows; `bit_for_bit`, whether all compared
        figures are equal; and for each figure `largest_difference`, relative to the uninterrupted run.
    """
    steps = sorted(whole)
    same_steps = steps == sorted(killed)
    common = [step for step in steps if step in killed]
    largest = dict.fromkeys(COMPARED, 0.0)
    for step in common:
        for name in COMPARED:
            expected, value = whole[step][name], killed[step][name]
            if value != expected:
                difference = abs(value - expected) / max(abs(expected), 1e-30)
                largest[name] = max(largest[name], difference if math.isfinite(difference) else math.inf)
    return {
        "steps": len(common),
        "same_rows": same_steps and all(whole[step]["receipt"] == killed[step]["receipt"] for step in common),
        "bit_for_bit": same_steps and bool(common) and not any(largest.values()),
        "largest_difference": largest,
    }
