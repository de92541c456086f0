"""The processes of one start on one node: started through DeepSpeed, told to stop, shown, killed to the last one.

Guarantees:
- Signals go to the ranks themselves. DeepSpeed's two launcher processes are never told: SIGTERM makes the first one
  leave its ranks orphaned and the second one end them one by one. Once the ranks end, both are dismissed, because the
  second kills what still saves 30 s after the first rank's end, if that had another code than 0.
- TERM, USR1 and USR2 are ignored from before the first exec on, so that a rank that is still importing outlives them;
  a rank is told once it has its own handler.
- What a rank's end means is read from the rank's own files (rank_main.py). A launcher that dies changes
  nothing: its ranks are known by their pids.
- `kill` leaves no process of this start, nor an orphan of an earlier one: all of them carry MARK in their environment.

Cost: reading a few files of /proc a poll. All of /proc is read only by `kill`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from electra_dist.run.processes import MARK, _field, is_alive, marked_pids
from launcher.supervise.rank_main import STACK_SIGNAL

_STACK_WAIT_S = 3.0
_KILL_WAIT_S = 30.0
_IGNORE_SIGNALS = 'trap "" TERM USR1 USR2; exec "$@"'  # ignored signals stay ignored across exec


class RankProcesses:
    """One start. `close` kills what is left of it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._folder = tempfile.TemporaryDirectory(prefix="electra-dist-ranks-")
        self.state = Path(self._folder.name)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._told: set[tuple[int, int]] = set()
        self.started = time.time()

    def start(self, command: Sequence[str]) -> None:
        """Run the command that starts the ranks, in a session of its own."""
        self.started = time.time()
        self._launcher = subprocess.Popen(
            ["sh", "-c", _IGNORE_SIGNALS, "sh", *command],
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARK: self._mark},
            start_new_session=True,
        )

    def launcher_runs(self) -> bool:
        """Whether the `deepspeed` command is there; its exit code means nothing."""
        return self._launcher is not None and self._launcher.poll() is None

    def dismiss_launcher(self) -> None:
        """End DeepSpeed's two processes, and nothing else. Of the ranks it takes no notice."""
        ranks = set(self._numbers("pid").values())
        for pid in marked_pids(self._mark):
            if pid not in ranks and b"deepspeed.launcher" in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def alive(self) -> dict[int, int]:
        """Rank -> pid of those that have begun and not ended."""
        return {rank: pid for rank, pid in self._numbers("pid").items() if is_alive(pid)}

    def codes(self) -> dict[int, int]:
        """Rank -> exit code, as the rank itself chose it; it may still be about to leave."""
        return self._numbers("exit")

    def lost(self) -> list[int]:
        """Ranks that ended without a word: killed, or aborted by a library."""
        return sorted(set(self._numbers("pid")) - set(self.alive()) - set(self.codes()))

    def stopped(self) -> list[int]:
        """Ranks that are not even running: stopped by a signal or a debugger, or waiting for a device."""
        return [rank for rank, pid in sorted(self.alive().items()) if _field(pid, "State")[:1] in "TtD"]

    def tell(self, number: int) -> list[int]:
        """Send a signal to every rank that has its own handler by now, once; returns the ranks told this time."""
        ended, told = self.codes(), []
        for rank, pid in self.alive().items():
            if rank not in ended and (pid, number) not in self._told and _catches(pid, number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    self._told.add((pid, number))
                    told.append(rank)
        return told

    def stacks(self) -> list[str]:
        """What every rank is at: the kernel's view, then its Python stacks. Stopped ones are continued for that."""
        views, answers = {}, {}
        for rank, pid in self.alive().items():
            views[rank] = [f"rank {rank}, pid {pid}: {_kernel_view(pid)}"]
            file = self.state / f"stack-{rank}"
            answers[rank] = (file, file.stat().st_size)
            if _catches(pid, STACK_SIGNAL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
                    os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < deadline and any(file.stat().st_size == old for file, old in answers.values()):
            time.sleep(0.05)
        time.sleep(0.1)  # the rest of an answer that has begun
        for rank, (file, old) in answers.items():
            lines = condensed(file.read_bytes()[old:].decode(errors="replace"))
            views[rank] += [f"  {line}" for line in lines] or [f"  no answer within {_STACK_WAIT_S:.0f} s"]
        return [line for rank in sorted(views) for line in views[rank]]

    def kill(self) -> list[int]:
        """kill -9 everything of this run on this node. Returns pids that cannot be killed: they wait for a device."""
        deadline = time.monotonic() + _KILL_WAIT_S
        if self._launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
        while left := marked_pids(self._mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if self._launcher is not None:
            self._launcher.wait()
        return left

    def close(self) -> list[int]:
        """Kill what is left and forget its files."""
        left = self.kill()
        self._folder.cleanup()
        return left

    def _numbers(self, name: str) -> dict[int, int]:
        return {int(file.name.rpartition("-")[2]): int(file.read_text()) for file in self.state.glob(f"{name}-*")}


def condensed(stacks: str) -> list[str]:
    """faulthandler's text of all threads: the main one first, equal ones once, a call a line, the innermost first."""
    threads = Counter(tuple(block.splitlines()[1:]) for block in reversed(stacks.strip().split("\n\n")) if block)
    lines = []
    for calls, count in threads.items():
        lines.append(f"{count} thread{'s' * (count > 1)}:")
        for call in calls:
            found = re.fullmatch(r'\s*File "(.*)", line (\d+) in (.*)', call)
            lines.append(f"  {found[1]}:{found[2]} {found[3]}" if found else f"  {call.strip()}")
    return lines


def _catches(pid: int, number: int) -> bool:
    mask = _field(pid, "SigCgt")
    return bool(mask) and bool(int(mask, 16) >> (number - 1) & 1)


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _kernel_view(pid: int) -> str:
    parts = [_field(pid, "State")]
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):  # the second one is root's
            text = " < ".join(Path(f"/proc/{pid}/{name}").read_text().replace("[<0>] ", "").split("\n")).strip(" <")
            parts.append(f"{name} {text}" if text.strip("0") else "")
    return ", ".join(part for part in parts if part)
