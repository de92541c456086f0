"""A program that a test starts as a fork behaves as the same program started by exec."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forked_popen import ForkedPopen, RealPopen

SHOW = """
import json, os, signal, sys
folder = sys.path[0]
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "first path": folder, "input": sys.stdin.read(),
    "variables": dict(os.environ), "leads a session": os.getsid(0) == os.getpid(), "umask": os.umask(0),
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals()) if number < 32],
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "environ": sorted(filter(None, open("/proc/self/environ").read().split(chr(0)))),
}, indent=1))
print("a line for stderr", file=sys.stderr)
"""
NESTED = """
import signal, subprocess, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
child = "import os, signal; print(signal.getsignal(signal.SIGUSR1), os.getppid() == PARENT, os.getsid(0) == SESSION)"
import os
child = child.replace("PARENT", str(os.getpid())).replace("SESSION", str(os.getsid(0)))
done = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
print(done.stdout, done.returncode)
"""
ENDS = {
    "the end of the file": "print('end')",
    "a number": "raise SystemExit(3)",
    "a message": "raise SystemExit('too bad')",
    "an exception": "import sys; sys.stdout.write('before'); raise ValueError(1)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "at once": "import os; os._exit(7)",
    "what is registered": "import atexit; atexit.register(print, 'registered'); print('end')",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
    "a closed reader": "import os; os.close(1); os._exit(5)",
}


def run(kind: type[subprocess.Popen], command: list[str], **options: Any) -> tuple[int, str, str]:
    """Run a command to its end, and return the exit code, stdout, and the last line of stderr."""
    process = kind(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **options
    )
    output, errors = process.communicate("some input", timeout=60)
    return process.returncode, output, errors.rpartition("\n")[0].rpartition("\n")[2]


@pytest.mark.parametrize("is_leader", [False, True])
def test_a_fork_has_the_arguments_files_names_and_handlers_of_a_start_by_exec(tmp_path: Path, is_leader: bool) -> None:
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    command = [sys.executable, str(program), "--option", "a value"]
    options = {"cwd": tmp_path, "env": {**os.environ, "MINE": "x=y"}, "start_new_session": is_leader}
    expected = run(RealPopen, command, **options)
    assert run(ForkedPopen, command, **options) == expected
    assert expected[0] == 0 and '"MINE=x=y"' in expected[1]


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_a_start_by_exec(end: str) -> None:
    command = [sys.executable, "-c", ENDS[end]]
    assert run(ForkedPopen, command) == run(RealPopen, command)


def test_a_program_that_a_fork_starts_is_its_child_and_inherits_what_is_ignored(tmp_path: Path) -> None:
    program = tmp_path / "nested.py"
    program.write_text(NESTED)
    expected = run(RealPopen, [sys.executable, str(program)])
    assert expected[1].splitlines()[0] == f"{signal.SIG_IGN} True True" and expected[0] == 0
    assert run(ForkedPopen, [sys.executable, str(program)]) == expected


def test_a_fork_is_killed_waited_for_and_polled_as_any_process() -> None:
    process = ForkedPopen([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.05)
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL == process.poll()
    process.stdout.close()
    assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize(
    "command",
    [["sleep", "0"], [sys.executable, "-X", "dev", "-c", "pass"], [sys.executable, "-m", "pip", "--version"]],
    ids=["no Python", "an option of the interpreter", "a foreign module"],
)
def test_other_commands_are_started_by_exec(command: list[str]) -> None:
    with ForkedPopen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert process._connection is None


def test_a_variable_that_imports_read_needs_a_start_by_exec(tmp_path: Path) -> None:
    for changed in ({"OMP_NUM_THREADS": "7"}, {"PYTHONPATH": str(tmp_path)}, {"LD_PRELOAD": ""}):
        with ForkedPopen([sys.executable, "-c", "pass"], env={**os.environ, **changed}) as process:
            assert process._connection is None, changed
    with ForkedPopen([sys.executable, "-c", "pass"], env={**os.environ, "OTHER": "7"}) as process:
        assert process._connection is not None
