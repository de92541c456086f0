"""A `subprocess.Popen` whose Python programs are forks of a process that has imported everything (fork_server.py).

`conftest.py` puts it in place of `subprocess.Popen` for all tests that do not have the marker `real_start`. Commands
that are no Python program of this environment, or that need what a fork cannot give, are started as always.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.fork_server import END, PID, TESTS, Start, become, receive, send_start, server_command
from support.process_names import ProcessNames

ADDRESS_VARIABLE = "ELECTRA_DIST_TESTS_FORK_SERVER"
RealPopen = subprocess.Popen
_real_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
# Variables that are read when Python starts or a library is imported: a command that changes one is started for real.
READ_AT_IMPORT = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "OMP_", "MKL_", "ATEN_", "DNNL_", "ONEDNN_", "TRITON_")
READ_LATE = ("PYTHONPATH", "PYTHONUNBUFFERED")
FORKED_PACKAGES = (
    "electra_dist",
    "electra_launcher",
    "electra_kernels",
    "deepspeed",
    "moto",
)  # whose modules are forked
_IGNORING_SHELL = [
    "sh",
    "-c",
    'trap "" TERM USR1 USR2; exec "$@"',
    "sh",
]  # of electra_launcher.supervise.rank_processes
_EXECUTE_CHILD = inspect.signature(RealPopen._execute_child)  # type: ignore[attr-defined]


class ForkedPopen(RealPopen):  # type: ignore[type-arg,valid-type,misc]
    """`subprocess.Popen` that forks Python programs.

    In a test's process the fork is made by the server, because a test's process has threads and process groups of its
    own. In a fork it is made by the fork itself, so that it is its child, in its session. A program that forks while
    another of its threads holds a lock of a library could hang.
    """

    processor_seconds = 0.0  # with those of its children, once a fork of the server has ended
    peak_bytes = 0  # of memory, with what it shares with the server
    names: ProcessNames | None = None  # in a fork: what changes the names of its own forks

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._connection: socket.socket | None = None
        super().__init__(*arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:
        given = _EXECUTE_CHILD.bind(self, *arguments).arguments
        start = _start_of(given)
        if start is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        descriptors = [number if end == -1 else end for number, end in enumerate(ends)]
        if ForkedPopen.names is None:
            self._ask_for_fork(start, descriptors)
        else:
            self._fork(start, descriptors, ForkedPopen.names)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    def _ask_for_fork(self, start: Start, descriptors: Sequence[int]) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(str(start_server()))
        send_start(self._connection, start, descriptors)
        self.pid = PID.unpack(receive(self._connection, PID.size))[0]

    def _fork(self, start: Start, descriptors: Sequence[int], names: ProcessNames) -> None:
        self.pid = _fork_of_this_process(start, names, descriptors)

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc]
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return pid and wait status, as `os.waitpid` does; pid 0 if WNOHANG is set and the process runs."""
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        patience_s = 0 if wait_flags & os.WNOHANG else None
        ready, _, _ = select.select([self._connection], [], [], patience_s)
        if not ready:
            return 0, 0
        status, self.processor_seconds, self.peak_bytes = END.unpack(receive(self._connection, END.size))
        self._connection.close()
        return self.pid, status


def spawn_as_fork(path: str | bytes, words: Sequence[str | bytes], kept: Sequence[int]) -> int:
    """Start a process of `multiprocessing` as a fork of this fork, as `multiprocessing.util.spawnv_passfds` would."""
    if ForkedPopen.names is None:
        return _real_spawn(path, words, kept)
    command = [os.fsdecode(word) for word in words]
    at = command.index("-c")
    start = Start(
        command=command,
        kind="code",
        target=command[at + 1],
        arguments=command[at + 2 :],
        environment=dict(os.environ),
        folder=os.getcwd(),
    )
    return _fork_of_this_process(start, ForkedPopen.names, [0, 1, 2], kept)


def _fork_of_this_process(
    start: Start, names: ProcessNames, descriptors: Sequence[int], kept: Sequence[int] = ()
) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    pid = os.fork()
    if pid == 0:
        become(start, names, descriptors, kept)
    return pid


def _start_of(given: Mapping[str, Any]) -> Start | None:
    """Return the start of a command, from the arguments of `Popen._execute_child`; None if it needs a real one."""
    needs_exec = ("shell", "preexec_fn", "executable", "pass_fds")
    if any(given[name] for name in needs_exec) or not given["close_fds"]:
        return None
    if any(given.get(name) is not None for name in ("gid", "gids", "uid")) or given.get("umask", -1) != -1:
        return None
    command = given["args"]
    if isinstance(command, (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in command]
    environment = _environment(given["env"])
    if _changes_imports(environment):
        return None
    return program_of(
        words,
        environment=environment,
        folder=os.path.abspath(os.fsdecode(given["cwd"] or os.curdir)),
        has_new_session=bool(given["start_new_session"]),
        process_group=given.get("process_group", -1),
        ignored_signals=[number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
    )


def _environment(given: Mapping[Any, Any] | None) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if given is None else given).items()}


def _changes_imports(environment: Mapping[str, str]) -> bool:
    """Return whether a variable that is read at imports differs from that of the server, which has this one's."""
    names = {name for name in (*environment, *_OWN_ENVIRONMENT) if name.startswith(READ_AT_IMPORT)}
    if any(environment.get(name) != _OWN_ENVIRONMENT.get(name) for name in names.difference(READ_LATE)):
        return True
    return not _import_folders(environment) <= _import_folders(_OWN_ENVIRONMENT)


def _import_folders(environment: Mapping[str, str]) -> set[str]:
    """Return the folders of PYTHONPATH, and those of this repository, in which the server finds its modules."""
    own = {str(TESTS.parent / folder) for folder in ("", "tests", "kernels", "launcher")}
    return own.union(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))


_OWN_ENVIRONMENT = dict(os.environ)


def program_of(words: Sequence[str], **options: Any) -> Start | None:
    """Return the start of a command that is a Python program of this environment; None for any other command."""
    command = list(words)
    if words[: len(_IGNORING_SHELL)] == _IGNORING_SHELL:
        options["ignored_signals"] = [*options["ignored_signals"], signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        words = words[len(_IGNORING_SHELL) :]
    if words[:2] == ["nice", "-n"]:
        options["niceness"] = int(words[2])
        words = words[3:]
    program, *rest = words
    if program == sys.executable:
        return _python_start(rest, command, options)
    script = _script_of(program, options["environment"])
    if script is None:
        return None
    return Start(command=[sys.executable, script, *rest], kind="file", target=script, arguments=rest, **options)


def _python_start(words: list[str], command: list[str], options: dict[str, Any]) -> Start | None:
    """Return the start of a command of the interpreter; None if it has options that change how Python starts."""
    while words and words[0] in ("-u", "-B"):
        options["is_unbuffered"] = options.get("is_unbuffered", False) or words[0] == "-u"
        words = words[1:]
    if len(words) >= 2 and words[0] in ("-m", "-c"):
        kind = "module" if words[0] == "-m" else "code"
        if kind == "module" and words[1].partition(".")[0] not in FORKED_PACKAGES:
            return None
        return Start(command=command, kind=kind, target=words[1], arguments=words[2:], **options)
    if words and not words[0].startswith("-"):
        path = Path(options["folder"], words[0])
        if path.suffix == ".py" and path.is_file():
            return Start(command=command, kind="file", target=words[0], arguments=words[1:], **options)
    return None


def _script_of(program: str, environment: Mapping[str, str]) -> str | None:
    """Return the path of a Python script that pip has installed in this environment, such as `deepspeed`."""
    scripts = Path(sysconfig.get_path("scripts"))
    if "/" not in program:
        folders = environment.get("PATH", "").split(os.pathsep)
        found = next((Path(folder, program) for folder in folders if Path(folder, program).is_file()), None)
        program = str(found) if found else program
    path = Path(program)
    if path.parent != scripts or not path.is_file():
        return None
    with path.open("rb") as file:
        # pip writes `python3` or `python3.11` in place of `python`.
        is_python = file.readline().startswith(b"#!" + os.fsencode(scripts / "python"))
    return str(path) if is_python else None


@contextlib.contextmanager
def address_of_server() -> Iterator[None]:
    """Put an address into the environment at which this process, or one that it starts, can start the server."""
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        os.environ[ADDRESS_VARIABLE] = f"{folder}/{os.getpid()}"
        yield


def start_server() -> Path:
    """Start the server at the address in the environment, unless it runs, and return the address.

    The server ends with the process that owns the address.
    """
    address = Path(os.environ[ADDRESS_VARIABLE])
    if address.exists():
        return address
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if address.exists():
            return address
        command, environment = server_command(str(address), owner=int(address.name))
        server = RealPopen(command, env=environment, stdin=subprocess.DEVNULL)
        while not address.exists():
            assert server.poll() is None, "the server of forks has ended"
            time.sleep(0.005)
    return address
