"""Measures what a command needs, in a process of its own: processor time, and memory above that of a bare Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

ELECTRA_DIST = "import sys; sys.argv[0] = 'electra-dist'; from electra_launcher.cli.main import main; main()"
# The peak is that of the process's own memory: `ru_maxrss` would include the memory of the process that forked it.
_PRINT_NEED = """
import atexit, re, resource, sys
def print_need():
    peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, int(peak_kib) * 1024 / 1e6, file=sys.stderr)
atexit.register(print_need)
"""


class Need(NamedTuple):
    """What a process needed: processor time, user and system, in seconds, and its peak memory in 1e6 bytes."""

    cpu_s: float
    memory_mb: float


def run_command(arguments: Sequence[str]) -> tuple[str, float]:
    """Run `electra-dist` with arguments; return its output and its memory at its peak above that of bare Python, MB.

    The command must end with exit code 0.
    """
    output, need = run_python([ELECTRA_DIST, *arguments])
    _, bare = run_python(["pass"])
    return output, need.memory_mb - bare.memory_mb


def run_python(arguments: Sequence[str]) -> tuple[str, Need]:
    """Run a program, the first of the arguments, with the others; return its output and what it needed.

    The program must end with exit code 0.
    """
    program, *rest = arguments
    command = [sys.executable, "-c", f"{_PRINT_NEED}\n{program}", *rest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cpu_s, memory_mb = map(float, done.stderr.splitlines()[-1].split())
    return done.stdout, Need(cpu_s, memory_mb)
