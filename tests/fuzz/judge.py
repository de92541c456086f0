"""Run a reader on a damaged file, and judge how it ended: exit code, lines, traceback, time and memory."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from electra_launcher.cli.main import main
from fuzz.readers import Reader
from support.forked_popen import ForkedPopen
from support.real_runs import REPOSITORY

from electra_dist.errors import TornCheckpoint, UserError, error_line

CODES = {0: "good", 1: "fault found", 69: "unhealthy node", 75: "stopped", 78: "refused"}
MORE_SECONDS = 10.0  # of processor time, than on good input; the time that passes depends on what else runs
LONGEST_SECONDS = 100.0  # that pass until a case ends, which sleeps or hangs
MORE_BYTES = 200 << 20
_ONE_COMMAND = [sys.executable, "-c", "from electra_launcher.cli.main import main; main()"]


@dataclass(frozen=True)
class Ending:
    """How a reader has ended."""

    outcome: str  # a value of CODES; "traceback", or another fault
    seconds: float  # of processor time
    peak_bytes: int  # of memory: of the whole process or, in this process, above what it had before
    text: str = ""  # what a fault shows: the traceback or the lines

    @property
    def is_fault(self) -> bool:
        """Return whether the reader must not end like this."""
        return self.outcome not in CODES.values()


class _TooLongError(BaseException):
    """Raised by the alarm in the middle of a reader that takes too long."""


def run_here(reader: Reader, root: Path) -> Ending:
    """Run a reader in this process, in the folder that holds `root`."""
    bytes_before = _memory_bytes("VmRSS:")
    _reset_peak()
    start = time.process_time()
    try:
        with contextlib.chdir(root.parent), _alarm(LONGEST_SECONDS):
            outcome, text = _run_command(reader, root) if reader.command else _run_function(reader, root)
    except _TooLongError:
        outcome, text = "takes too long", traceback.format_exc()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # noqa: BLE001  (whatever it is, the user would see it)
        outcome, text = "traceback", traceback.format_exc()
    return Ending(outcome, time.process_time() - start, _memory_bytes("VmHWM:") - bytes_before, text)


def run_as_process(reader: Reader, root: Path) -> Ending:
    """Run a command as a process of its own."""
    process = subprocess.Popen(
        [*_ONE_COMMAND, *_arguments(reader, root)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=root.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels")))},
    )
    assert process.stderr is not None
    with contextlib.suppress(ProcessLookupError):  # it has ended
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (60, 60))
    try:
        with _alarm(LONGEST_SECONDS):
            stderr = process.stderr.read()
    except _TooLongError:
        process.kill()
        process.wait()
        return Ending("takes too long", LONGEST_SECONDS, 0, "it was killed")
    status, seconds, peak_bytes = _wait(process)
    outcome, text = _judged(status, stderr)
    return Ending(outcome, seconds, peak_bytes, text)


def compared(ending: Ending, good: Ending) -> Ending:
    """Return an ending, as a fault if it took more time or memory than the ending on good input allows."""
    if ending.is_fault:
        return ending
    if ending.seconds > good.seconds + MORE_SECONDS:
        return Ending("takes too long", ending.seconds, ending.peak_bytes, f"{ending.seconds:.1f} s")
    if ending.peak_bytes > good.peak_bytes + MORE_BYTES:
        more = (ending.peak_bytes - good.peak_bytes) >> 20
        return Ending(
            "takes too much memory", ending.seconds, ending.peak_bytes, f"{more} MiB more than on good input"
        )
    return ending


def _wait(process: subprocess.Popen[str]) -> tuple[int, float, int]:
    """Wait for a process; return its exit code (negative after a signal), seconds of processor and peak of memory."""
    if isinstance(process, ForkedPopen):
        return process.wait(), process.processor_seconds, process.peak_bytes
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def _arguments(reader: Reader, root: Path) -> list[str]:
    return [part.format(root=root) for part in reader.command]


def _run_function(reader: Reader, root: Path) -> tuple[str, str]:
    assert reader.function is not None
    try:
        with mock.patch("sys.stdout", _stream()), mock.patch("sys.stderr", _stream()):
            reader.function(root)
    except (UserError, TornCheckpoint) as error:
        return _judged(78, error_line(error))
    return "good", ""


def _run_command(reader: Reader, root: Path) -> tuple[str, str]:
    stdout, stderr = _stream(), _stream()
    code = 0
    with (
        mock.patch("sys.argv", ["electra-dist", *_arguments(reader, root)]),
        mock.patch("sys.stdout", stdout),
        mock.patch("sys.stderr", stderr),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    stderr.seek(0)
    return _judged(code, stderr.read())


def _judged(code: int, stderr: str) -> tuple[str, str]:
    """Return the outcome for an exit code and what was written to stderr, and the text that shows a fault."""
    if "Traceback" in stderr:
        return "traceback", stderr
    if code not in CODES:
        return f"exit code {code}", stderr
    errors = [line for line in stderr.split("\n") if line.startswith("error: ")]
    if code == 78 and (len(errors) != 1 or stderr.rstrip("\n").split("\n")[-1] != errors[0]):
        return "not one line", stderr
    if code == 78 and len(errors[0]) > 3000:
        return "a line that is too long", errors[0]
    return CODES[code], ""


def _stream() -> io.TextIOWrapper:
    """Return a stream that refuses what a terminal in UTF-8 refuses."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise _TooLongError in the block after some seconds."""

    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _reset_peak() -> None:
    """Let the kernel begin again to count this process's peak of memory."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _memory_bytes(name: str) -> int:
    """Return this process's memory: "VmRSS:" is that of now, "VmHWM:" the peak since `_reset_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
