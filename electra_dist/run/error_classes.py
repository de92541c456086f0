"""Say from a rank's exit code and the end of its output why it has ended, whose fault that is, and what may be done.

Guarantee: `classify` is a pure function. `CLASSES` is read from the top, and the first class that fits decides: a
fault of the hardware comes before the CUDA error that it causes, and that before the collectives that then fail. A
class marked as a consequence says that another rank ended first, so a class of any other rank explains more.

Limits: the texts are those of torch 2.x, NCCL, the NVIDIA driver, Slurm and Python; a text that no pattern knows gives
the exception, the signal or "unknown". The kernel's own log is not read, because that needs root: a rank that got
SIGKILL counts as killed for memory only if the kernel's counter of such kills has grown meanwhile.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from electra_dist.errors import EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR

Fault = Literal["node", "job", "code", "user"]
Restart = Literal["as it is", "elsewhere", "never"]

_LONGEST_LINE = 300  # characters of the telling line that are kept
# Lines about storage that a rank waits for or has got back, and NCCL's notes on plugins that are not installed: what
# they name did not end it.
_HARMLESS = re.compile(r"^(waiting up to|storage is back)|NCCL INFO")
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Fault)\w*)(: |$)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback in a process group
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, kw_only=True)
class ErrorClass:
    """A kind of failure of a rank: how its output shows it, whose fault it is, and what follows."""

    name: str
    title: str  # for a person
    fault: Fault
    next_step: str
    restart: Restart = "as it is"  # after its first occurrence
    patterns: str = ""  # regular expression for a line of the output; "": the exit code alone tells
    is_consequence: bool = False  # another rank or node ended first
    repeats_are_final: bool = False  # the same at the same step again is not started a third time


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why a rank has ended, with the line of its output that shows this, or "" if no line does."""

    error: ErrorClass
    line: str = ""


CLASSES = (
    ErrorClass(
        name="ecc",
        title="memory of a GPU is damaged (ECC)",
        fault="node",
        restart="elsewhere",
        next_step="reset or replace the GPU; the node is left out until its strike expires",
        patterns=r"uncorrectable ECC error|double.bit ECC error|NVRM: Xid .*: (48|63|64|94|95),",
    ),
    ErrorClass(
        name="nvlink",
        title="a link between GPUs has failed (NVLink)",
        fault="node",
        restart="elsewhere",
        next_step="look at the node with `nvidia-smi nvlink --status`; it is left out until its strike expires",
        patterns=r"uncorrectable NVLink error|NVLink.*(fatal|uncorrect)|NVRM: Xid .*: 74,|CUDA_ERROR_NVLINK_UNCORRECT",
    ),
    ErrorClass(
        name="device-assert",
        title="CUDA error, device-side assert",
        fault="code",
        next_step="look at the ids of these rows; CUDA_LAUNCH_BLOCKING=1 shows the operation",
        patterns=r"device-side assert triggered|block: \[\d+,\d+,\d+\], thread: .* Assertion .* failed"
        r"|CUDA_ERROR_ASSERT",
        repeats_are_final=True,
    ),
    ErrorClass(
        name="illegal-address",
        title="CUDA error, illegal address",
        fault="code",
        next_step="CUDA_LAUNCH_BLOCKING=1 shows the operation; if only one node has it, test that node's GPU",
        patterns=r"illegal memory access|misaligned address|CUDA_ERROR_ILLEGAL_ADDRESS|Warp Illegal Address"
        r"|NVRM: Xid .*: (13|31),"
        r"|CUDA error: (an illegal instruction|unspecified launch failure)",
        repeats_are_final=True,
    ),
    ErrorClass(
        name="xid",
        title="a GPU is lost (Xid)",
        fault="node",
        restart="elsewhere",
        next_step="look at `dmesg` on the node; it is left out until its strike expires",
        patterns=r"NVRM: Xid|fallen off the bus|GPU is lost|CUDA error: hardware stack error|Unable to determine the "
        r"device handle for GPU",
    ),
    ErrorClass(
        name="cuda-out-of-memory",
        title="CUDA out of memory",
        fault="user",
        next_step="lower train.micro_batch or set it to auto; results stay the same up to rounding",
        patterns=r"CUDA out of memory|OutOfMemoryError: (CUDA|HIP)|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
        r"|CUDA error: out of memory|CUDA failure 2 'out of memory'",
        repeats_are_final=True,
    ),
    ErrorClass(
        name="shared-memory",
        title="shared memory of the node is full",
        fault="job",
        next_step="give the container more shared memory, as with docker's --shm-size",
        patterns=r"unable to (open|mmap|allocate|write to file|resize).* shared memory|insufficient shared memory"
        r"|No space left on device.*/dev/shm|/dev/shm.*No space left on device"
        r"|Error while creating shared memory segment",
    ),
    ErrorClass(
        name="host-out-of-memory",
        title="memory of the node is used up; the kernel killed a process",
        fault="job",
        next_step="ask Slurm or the container for more memory, or run fewer ranks on the node",
        patterns=r"oom.kill event|[Oo]ut of memory: Killed process|Memory cgroup out of memory|is killed by signal: "
        r"Killed|can't allocate memory|Cannot allocate memory|std::bad_alloc|^MemoryError"
        r"|exceeded (step|job) memory limit",
        repeats_are_final=True,
    ),
    ErrorClass(
        name="disk-quota",
        title="disk quota used up",
        fault="user",
        next_step="free space or raise the quota; `electra-dist status` shows who waits for storage",
        patterns=r"[Dd]isk quota exceeded|\[Errno 122\]|EDQUOT|QuotaExceeded",
    ),
    ErrorClass(
        name="storage",
        title="storage is full or away",
        fault="node",
        next_step="free space, or look at the mount or the service that the line names",
        patterns=r"No space left on device|\[Errno (5|28|30|107|108|116)\]|Stale file handle|Input/output error"
        r"|Transport endpoint is not connected|Read-only file system|StorageLost|StoreAway",
    ),
    ErrorClass(
        name="driver",
        title="GPU driver missing or too old",
        fault="node",
        restart="elsewhere",
        next_step="install the driver on the node, or a torch for its CUDA version",
        patterns=r"Found no NVIDIA driver|driver version is insufficient|NVIDIA driver on your system is too old"
        r"|Driver/library version mismatch|libcuda\.so\S*: cannot open|no CUDA-capable device is detected"
        r"|CUDA error: system not yet initialized|forward compatibility was attempted",
    ),
    ErrorClass(
        name="library",
        title="a library is missing or does not fit",
        fault="user",
        next_step="install the library that the line names on every node, or load its module with --setup",
        patterns=r"cannot open shared object file|undefined symbol|GLIBC\w*_[\d.]+' not found|no kernel image is "
        r"available|libnccl.*not found|symbol lookup error",
        repeats_are_final=True,
    ),
    ErrorClass(
        name="import",
        title="a Python module cannot be imported",
        fault="user",
        next_step="install the module in the environment of the ranks, on every node",
        patterns=r"^ModuleNotFoundError|^ImportError|No module named",
        repeats_are_final=True,
    ),
    ErrorClass(
        name="port",
        title="the port of the ranks is in use",
        fault="job",
        next_step="nothing: the next start takes another port",
        patterns=r"Address already in use|EADDRINUSE|\[Errno 98\]",
    ),
    ErrorClass(
        name="network",
        title="a network card or switch has failed",
        fault="node",
        next_step="look at the cards that the line names (`ibstat`, `ip link`), and at docs/cluster.md on NCCL",
        patterns=r"Got completion from peer .* with (status|error)|ibv_\w+ failed|IBV_WC_\w+|Call to ibv|NET/\w+ : .*"
        r"(async event|port error|local catastrophic)|No route to host|Network is unreachable"
        r"|EndpointConnectionError|ConnectTimeout|ReadTimeout|^([\w.]+\.)?(ConnectionError|TimeoutError)\b",
    ),
    ErrorClass(
        name="nccl-timeout",
        title="a collective timed out",
        fault="job",
        next_step="look for the rank that did not arrive: hangs/ in the run folder has the stacks of all ranks",
        patterns=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms|collective.* timed? ?out"
        r"|ran for \d+ milliseconds before timing out|wait timeout after \d+ms"
        r"|socket has timed out",
        is_consequence=True,
    ),
    ErrorClass(
        name="peer-abort",
        title="another rank has ended",
        fault="job",
        next_step="look at the rank that ended first, on this or another node",
        patterns=r"[Cc]onnection (reset|closed|aborted) by (remote )?peer|ncclRemoteError|remote process exited"
        r"|NCCL communicator was aborted|Broken pipe|Socket closed|failed to recv, got 0 bytes"
        r"|Connection refused|DistNetworkError|DistStoreError|DistBackendError|ncclSystemError"
        r"|ncclInternalError|gloo/transport",
        is_consequence=True,
    ),
    ErrorClass(
        name="preemption",
        title="the scheduler has taken the nodes away",
        fault="job",
        next_step="nothing: the next job goes on from the newest checkpoint",
        patterns=r"DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE)|CANCELLED AT .* DUE TO|[Pp]reempt(ed|ion) (by|notice)",
    ),
)

_REFUSED = ErrorClass(
    name="refused",
    title="the config or an input was refused",
    fault="user",
    restart="never",
    next_step="correct what the line names, then start again; nothing is lost",
    patterns=r"^error: ",
)
_UNHEALTHY = ErrorClass(
    name="unhealthy",
    title="the node or one of its GPUs is unhealthy",
    fault="node",
    restart="elsewhere",
    next_step="strikes.jsonl in the run folder has the reason; the node is left out until its strike expires",
)
_AWAY = ErrorClass(
    name="storage-away",
    title="its storage was away for too long",
    fault="node",
    next_step="look at the storage that the line names, then start again",
    is_consequence=True,  # beside a rank that has crashed, it only stopped
)
_KILLED = ErrorClass(
    name="killed",
    title="killed by a signal from outside",
    fault="job",
    next_step="nothing, if a person or the scheduler did it; otherwise `dmesg` says whether memory ran out",
)
_NATIVE = ErrorClass(
    name="native-crash",
    title="crash in a library",
    fault="code",
    next_step="the stacks are at the end of the rank's output; test the node's memory if only one node has it",
    repeats_are_final=True,
)
_PYTHON = ErrorClass(
    name="exception",
    title="Python exception",
    fault="code",
    next_step="read the traceback at the end of the rank's output",
    repeats_are_final=True,
)
HANG = ErrorClass(
    name="hang",
    title="a rank was silent for too long",
    fault="job",
    next_step="hangs/ in the run folder has the stacks of all ranks",
)
_UNKNOWN = ErrorClass(
    name="unknown",
    title="ended without a known reason",
    fault="code",
    next_step="read the end of the rank's output",
)

# An aborted process: of a library, or of the C++ runtime after an exception.
_NATIVE_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
_BY_EXIT_CODE = {EXIT_UNHEALTHY: _UNHEALTHY, EXIT_USER_ERROR: _REFUSED, EXIT_STOPPED: _AWAY}
_BY_NAME = {
    error.name: error for error in (*CLASSES, _REFUSED, _UNHEALTHY, _AWAY, _KILLED, _NATIVE, _PYTHON, HANG, _UNKNOWN)
}


def class_of(name: str) -> ErrorClass:
    """Return the class of failures with this name, or that of unknown failures if this version has no such class."""
    return _BY_NAME.get(name, _UNKNOWN)


def class_of_stop_for_storage(why: str) -> ErrorClass:
    """Classify a stop for lack of storage by its recorded reason: a quota was used up, or the storage was away."""
    return class_of("disk-quota") if re.search(r"\(\w*quota\w*\)", why, re.IGNORECASE) else _AWAY


def classify(code: int, output: str, num_killed_for_memory: int = 0) -> Finding:
    """Return why a rank ended, judged by its exit code (-N for signal N) and its last lines on stderr, `output`.

    `num_killed_for_memory` is how many processes of the node the kernel killed for lack of memory while the rank ran.
    """
    lines = [_RANK_PREFIX.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not _HARMLESS.search(line)]
    if code in _BY_EXIT_CODE:
        return Finding(error=_BY_EXIT_CODE[code], line=_last_match(_REFUSED, lines))
    is_killed = code < 0 and -code not in _NATIVE_SIGNALS
    if is_killed:
        return _classify_kill(code, lines, num_killed_for_memory)
    for error in CLASSES:
        line = _last_match(error, lines)
        if line:
            return Finding(error=error, line=line)
    if code < 0:
        return Finding(error=_NATIVE, line=f"{_signal_name(-code)}: {_last_exception(lines)}".removesuffix(": "))
    if _TRACEBACK in lines:
        return Finding(error=_PYTHON, line=_last_exception(lines))
    return Finding(error=_UNKNOWN, line=_shortened(lines[-1]) if lines else "")


def decisive(findings: Iterable[tuple[int, Finding]]) -> tuple[int, Finding] | None:
    """Return the rank whose end explains why all ranks ended, with its finding; None if there are no findings.

    Ranks that ended only because another one did are considered last. Among the others, the class that comes first in
    `CLASSES` wins, then a finding with a line, because one rank prints what all ranks refuse, then the first finding.
    """
    found = list(findings)
    causes = [(rank, finding) for rank, finding in found if not finding.error.is_consequence]
    number_of_class = {error.name: number for number, error in enumerate(CLASSES)}

    def order(of_rank: tuple[int, Finding]) -> tuple[int, bool]:
        _, finding = of_rank
        return number_of_class.get(finding.error.name, len(CLASSES)), not finding.line

    return min(causes or found, key=order, default=None)


def is_same_fault(line: str, other: str) -> bool:
    """Return whether two lines of output show the same fault: they differ in numbers and addresses only."""
    return _without_numbers(line) == _without_numbers(other)


def _classify_kill(code: int, lines: list[str], num_killed_for_memory: int) -> Finding:
    """Return why a signal ended a rank: lack of memory, a preemption, or an unknown sender."""
    # What the rank had printed before is no reason, but the words of the kernel or of Slurm are.
    for name in ("host-out-of-memory", "preemption"):
        line = _last_match(class_of(name), lines)
        if line:
            return Finding(error=class_of(name), line=line)
    if code == -signal.SIGKILL and num_killed_for_memory:
        text = f"SIGKILL; the kernel has killed {num_killed_for_memory} process(es) of this node for memory meanwhile"
        return Finding(error=class_of("host-out-of-memory"), line=text)
    return Finding(error=_KILLED, line=_signal_name(-code))


def _last_match(error: ErrorClass, lines: list[str]) -> str:
    matches = [line for line in lines if re.search(error.patterns, line)] if error.patterns else []
    return _shortened(matches[-1]) if matches else ""


def _last_exception(lines: list[str]) -> str:
    """Return the line of the last traceback that names its exception, or "" if there is no traceback."""
    if _TRACEBACK not in lines:
        return ""
    newest = len(lines) - lines[::-1].index(_TRACEBACK)
    named = [line for line in lines[newest:] if _EXCEPTION.match(line)]
    return _shortened(named[0] if named else lines[-1])


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def _without_numbers(line: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", line)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals, which have no names
        return f"signal {number}"
