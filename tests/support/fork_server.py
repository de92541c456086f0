"""Start Python programs as forks of a process that has imported everything, in milliseconds instead of seconds.

A start of one rank imports torch and DeepSpeed for about four seconds and then trains a tiny model for one. The tests
start a thousand programs. So one server for all workers of a pytest call imports all modules of this project once, and
`forked_popen.py` asks it for a fork wherever a test, or a program under test, starts a Python program with
`subprocess`.

Guarantee: a fork has the arguments, environment, working folder, files, session and signal handlers of a program that
was started by exec; /proc shows its command and environment. Python's state is that of a fresh interpreter which has
imported the modules and has run nothing.

Limits: what a program does while it imports, and variables that are read during imports (`forked_popen.py` lists
them), need a real start. Resource limits, umask and the parent are those of the server; all forks have the same hash
seed and the same state of NumPy's global generator. A run writes no report.html at its end, which takes longer than a
tiny run. Linux 5.3 or later.

The tests of a start itself have the marker `real_start`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import gc
import io
import json
import logging
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from support.process_names import ROOM, ProcessNames

TESTS = Path(__file__).resolve().parents[1]
END = struct.Struct("idq")  # the wait status of a fork, its seconds of processor and its peak of memory in bytes
PID = struct.Struct("i")
_COMMAND_ROOM = 20_000  # bytes of the longest command line that a fork can show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Everything that a fork needs to be the program that a command names."""

    command: list[str]  # as /proc shows it
    kind: str  # "module", "file" or "code": what `target` is
    target: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str  # working folder
    is_unbuffered: bool = False
    has_new_session: bool = False
    process_group: int = -1
    ignored_signals: list[int] = dataclasses.field(default_factory=list)
    niceness: int = 0


def import_everything() -> None:
    """Import all modules that a program of this project imports, at its start or later, for the forks to share."""
    import importlib
    import pkgutil

    # Modules that others import only when they make an engine, an S3 client, a page or a model.
    for name in (
        "boto3.s3.inject",
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.muon.original_muon",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "scipy.stats",
        "sklearn.metrics",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "transformers.models.auto.modeling_auto",
        "transformers.models.electra.modeling_electra",
        "transformers.models.modernbert.modeling_modernbert",
    ):
        with contextlib.suppress(ImportError):  # another version has no such module
            importlib.import_module(name)
    import electra_kernels
    import electra_launcher

    import electra_dist

    for package in (electra_dist, electra_launcher, electra_kernels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                # A module of an optional package, or one that Triton's absence forbids.
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__  # noqa: B018  (found with compilers in 0.4 s, and kept)
    gc.collect()
    gc.freeze()  # The collector of a fork then leaves these objects alone, so their memory stays shared.


def become(start: Start, names: ProcessNames, descriptors: Sequence[int], kept: Collection[int] = ()) -> NoReturn:
    """Be the program of `start` in this forked process, and end the process with the program's exit code.

    `names` writes the command and the environment that /proc shows. `descriptors` become stdin, stdout and stderr of
    the program; it has the descriptors `kept` under their numbers, and no others.
    """
    from support import forked_popen

    import electra_dist.report.report_page

    code = 1
    try:
        _take_files(descriptors, kept)
        if start.has_new_session:
            os.setsid()
        if start.process_group >= 0:
            os.setpgid(0, start.process_group)
        os.nice(start.niceness)
        _restore_signals(start.ignored_signals)
        os.chdir(start.folder)
        _forget_the_parent()
        _prepare_interpreter(start)  # first, because it removes C's pointers into the memory that is overwritten next
        names.set_command(*start.command)
        names.set_environment(start.environment)
        if start.kind != "code":  # a program that trains would write a page at its end
            electra_dist.report.report_page.write_report = lambda run_dir, path=None: path or run_dir / "report.html"
        forked_popen.ForkedPopen.names = names
        subprocess.Popen = forked_popen.ForkedPopen  # type: ignore[misc]
        multiprocessing.util.spawnv_passfds = forked_popen.spawn_as_fork  # type: ignore[attr-defined]
        code = _run(start)
    except BaseException:  # noqa: BLE001  (a fork must not return into the program that it was forked from)
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    os._exit(code)


def _take_files(descriptors: Sequence[int], kept: Collection[int]) -> None:
    """Make three descriptors stdin, stdout and stderr, and let go of all other files that this process has.

    The other numbers become /dev/null instead of being closed: a Python object that the fork has inherited may close
    its number at any time, which must not be one that the program has opened.
    """
    copies = [_above_standard(descriptor) for descriptor in descriptors]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (null, *kept):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.fstat(int(name))
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _above_standard(descriptor: int) -> int:
    """Return a duplicate that is none of 0, 1 and 2, which `dup2` would overwrite before it is used."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _restore_signals(ignored: Sequence[int]) -> None:
    """Set all handlers to those that a newly started Python program has."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *ignored):
        signal.signal(number, signal.SIG_IGN)


def _forget_the_parent() -> None:
    """Drop what the process that was forked would do at its own end: delete its folders, wait for its children."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _prepare_interpreter(start: Start) -> None:
    """Set the environment, the arguments, the paths for imports and the buffers of the standard files."""
    own_paths = _paths_of(os.environ)
    os.environ.clear()
    os.environ.update(start.environment)
    tempfile.tempdir = None  # the folder of the parent's TMPDIR
    script_folder = str(Path(start.target).resolve().parent) if start.kind == "file" else os.getcwd()
    rest = [path for path in sys.path if path not in own_paths and path != str(TESTS / "support")]
    sys.path[:] = [script_folder, *_paths_of(start.environment), *rest]
    sys.argv[:] = [start.target if start.kind == "file" else "-c", *start.arguments]
    _open_standard_files(start.is_unbuffered or bool(start.environment.get("PYTHONUNBUFFERED")))


def _open_standard_files(is_unbuffered: bool) -> None:
    """Give Python new objects for the standard files, also where a logger has kept an old one."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    replaced = {}
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        file = io.TextIOWrapper(
            open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
            errors=errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        replaced[getattr(sys, name)] = file
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", []):
            if isinstance(handler, logging.StreamHandler) and handler.stream in replaced:
                handler.stream = replaced[handler.stream]


def _paths_of(environment: Mapping[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _run(start: Start) -> int:
    """Run the program and what it has registered for its end, and return its exit code."""
    is_interrupted = False
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # of modules that are imported already
    try:
        if start.kind == "module":
            runpy.run_module(start.target, run_name="__main__", alter_sys=True)
        elif start.kind == "file":
            runpy.run_path(start.target, run_name="__main__")
        else:
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(start.target, "<string>", "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        is_interrupted = isinstance(error, KeyboardInterrupt)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def main(address: str, owner: int) -> None:
    """Serve until the process `owner` ends: fork a program for every connection to the socket `address`.

    When the program has ended, its wait status is sent over the connection.
    """
    # Before other imports, because it keeps the environment of this process, which some of them change.
    import support.forked_popen  # noqa: F401

    names = ProcessNames()
    owner_end = os.pidfd_open(owner)
    waker, wakened = socket.socketpair()
    for end in (waker, wakened):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)  # whoever finds the address can connect
        import_everything()
        while True:
            ready, _, _ = select.select([owner_end, listener, wakened], [], [])
            if owner_end in ready:
                os._exit(0)  # without the clean-up of libraries, which print what they have not freed
            if wakened in ready:
                wakened.recv(4096)
                _report_ends(running)
            if listener in ready:
                connection, _ = listener.accept()
                try:
                    start, descriptors = receive_start(connection)
                except (OSError, EOFError, struct.error):  # the test that asked has ended
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    become(start, names, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                running[pid] = connection
                with contextlib.suppress(OSError):  # the test that asked has ended
                    connection.sendall(PID.pack(pid))


def _report_ends(running: dict[int, socket.socket]) -> None:
    """Collect the forks that have ended, and send the wait status of each to whoever asked for it."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = running.pop(pid, None)
            if connection is not None:
                with connection, contextlib.suppress(OSError):  # the test that asked has ended
                    connection.sendall(END.pack(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))


def send_start(connection: socket.socket, start: Start, descriptors: Sequence[int]) -> None:
    """Send a start and the three descriptors of its standard files."""
    content = json.dumps(dataclasses.asdict(start)).encode()
    socket.send_fds(connection, [struct.pack("q", len(content))], list(descriptors))
    connection.sendall(content)


def receive_start(connection: socket.socket) -> tuple[Start, list[int]]:
    """Return what `send_start` has sent."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    (size,) = struct.unpack("q", head)
    return Start(**json.loads(receive(connection, size))), list(descriptors)


def receive(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; raise EOFError if the other end was closed before."""
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise EOFError("the other process has ended")
        content += more
    return content


def server_command(address: str, owner: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that start a server, with room for the names of its forks."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *_paths_of(os.environ)])
    home = str(Path(address).parent)  # for a user without one, because some packages need it when they are imported
    environment = {"HOME": home, **os.environ, **ROOM, "PYTHONPATH": path}
    return [sys.executable, "-B", __file__, address, str(owner), "x" * _COMMAND_ROOM], environment


if __name__ == "__main__":
    from support import fork_server  # the module that the forks know by this name

    fork_server.main(sys.argv[1], int(sys.argv[2]))
