"""Numbers every durable operation of a process, and kills the process at one of them.

A durable operation changes files below a folder, or objects of S3 or Azure: create, write, rename, link, unlink,
mkdir, rmdir and truncate of files, and every request that stores or deletes something. The functions of `os`, `open`,
the events of boto3's clients and the requests of obstore's are intercepted, so the code of the product is not changed.

An operation is named by its process, its kind, its file, and how often this process has done that before. The order
of threads does not matter, so another run of the same code finds the same operation again. An attempt without an
effect, such as deleting a file that does not exist, is no operation. An audit hook lists changes of files that passed
by the interception (`OperationLog.missed`); the list must be empty.

Limits: a kill loses nothing that the kernel holds, so fsync changes nothing here. It protects against power cuts,
which are not simulated.
"""

from __future__ import annotations

import builtins
import http.client
import http.server
import io
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

from support.forwarding import ForwardingHandler
from typing_extensions import override

import electra_dist.store.s3.requests
from electra_dist.store.cloud_store import CloudStore

Moment = Literal["before", "torn", "after"]

STORING_REQUESTS = {
    "PutObject": "PUT",
    "DeleteObject": "DELETE",
    "DeleteObjects": "DELETE of several",
    "CreateMultipartUpload": "begin of parts",
    "UploadPart": "part",
    "CompleteMultipartUpload": "end of parts",
    "AbortMultipartUpload": "DELETE of parts",
}
BLOB_REQUESTS = {  # method and kind of component -> kind of operation
    ("PUT", ""): "PUT",
    ("PUT", "block"): "part",
    ("PUT", "blocklist"): "end of parts",
    ("DELETE", ""): "DELETE",
    ("POST", "batch"): "DELETE",  # of one object; its key is in the body
}
_AUDITED_CHANGES = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR
_RANDOM = re.compile(r"(?<=[.-])([0-9a-f]{8}|[0-9a-f]{32})(?=$|\.)")  # the random part of a temporary name


class Operation(NamedTuple):
    """One durable operation of the uninterrupted run."""

    phase: str  # part of the run, such as "start 1"
    rank: int
    kind: str
    file: str  # below the run's folder; "s3:KEY" or "az:KEY" for an object
    occurrence: int  # from 1, among the operations of this kind on this file by this process
    num_bytes: int  # of a write; 0 for other kinds

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments at which a kill makes a difference: a write can also be torn after half of its bytes."""
        return ("before", "torn", "after") if self.num_bytes > 1 else ("before", "after")


class Kill(NamedTuple):
    """A kill -9 of one process at one of its durable operations."""

    operation: Operation
    moment: Moment


class OperationLog:
    """The durable operations of this process below a folder, and the kill at one of them, if there is one."""

    def __init__(self, folder: Path, s3_prefix: str, phase: str, rank: int, kill: Kill | None) -> None:
        """Begin to intercept this process's operations; call it once in a process that was forked for a run.

        Args:
            folder: the folder whose files are watched.
            s3_prefix: what the keys of the run's objects begin with; it is left out of the names.
            phase: part of the run that this process belongs to.
            rank: number of this process in that part.
            kill: where the process kills itself; None: nowhere.
        """
        self.operations: list[Operation] = []
        self.missed: list[str] = []
        self._root = f"{folder}/"
        self._s3_prefix = s3_prefix
        self._phase = phase
        self._rank = rank
        self._kill = kill if kill and (kill.operation.phase, kill.operation.rank) == (phase, rank) else None
        self._counts = Counter[tuple[str, str]]()
        self._lock = threading.Lock()
        self._thread = threading.local()  # .inside: whether this thread is in an intercepted function
        self._intercept_os()
        self._intercept_open()
        self._intercept_s3()
        self._intercept_azure()
        sys.addaudithook(self._audit)

    def perform(
        self, kind: str, file: str, act: Callable[[], Any], num_bytes: int = 0, tear: Callable[[], Any] | None = None
    ) -> Any:
        """Perform an operation and return its result, or kill this process before, within or after it.

        Args:
            kind: kind of the operation.
            file: name of the file in the log.
            act: performs the operation.
            num_bytes: size of a write.
            tear: writes half of the bytes.
        """
        moment = self._number(kind, file, num_bytes)
        if moment == "before":
            die()
        if moment == "torn":
            assert tear is not None
            tear()
            die()
        try:
            return self.inside(act)
        finally:
            if moment == "after":
                die()

    def inside(self, act: Callable[[], Any]) -> Any:
        """Call `act`, whose changes of files the audit hook does not report."""
        self._thread.inside = True
        try:
            return act()
        finally:
            self._thread.inside = False

    def name(self, path: Any) -> str | None:
        """Return the name of a watched path or open file descriptor in the log; None if it is not watched."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.path.abspath(os.fsdecode(path))
        if not path.startswith(self._root):
            return None
        return _RANDOM.sub("*", path.removeprefix(self._root))

    def _number(self, kind: str, file: str, num_bytes: int) -> Moment | None:
        """Add an operation to the log; return when to kill this process, None if the kill is not at this operation."""
        with self._lock:
            self._counts[kind, file] += 1
            occurrence = self._counts[kind, file]
            self.operations.append(Operation(self._phase, self._rank, kind, file, occurrence, num_bytes))
        if self._kill is None:
            return None
        victim = self._kill.operation
        is_victim = (victim.kind, victim.file, victim.occurrence) == (kind, file, occurrence)
        return self._kill.moment if is_victim else None

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record a change of a watched file that no intercepted function makes."""
        if getattr(self._thread, "inside", False):
            return
        is_change = event in _AUDITED_CHANGES or (event == "open" and arguments[2] & _WRITING_FLAGS)
        if is_change and not isinstance(arguments[0], int):
            file = self.name(arguments[0])
            if file is not None:
                self.missed.append(f"{event} {file}")

    def _intercept_os(self) -> None:
        """Replace the functions of `os` that change files."""

        def replace(name: str, kind: str, target: int, has_effect: Callable[..., bool]) -> None:
            original = getattr(os, name)

            def intercepted(*arguments: Any, **options: Any) -> Any:
                def act() -> Any:
                    return original(*arguments, **options)

                file = self.name(arguments[target])
                if file is None or not has_effect(*arguments):
                    return self.inside(act)
                return self.perform(kind, file, act)

            setattr(os, name, intercepted)

        def always(*_: Any) -> bool:
            return True

        def is_there(path: Any, *_: Any) -> bool:
            return os.path.lexists(path)

        replace("replace", "rename", 1, always)
        replace("rename", "rename", 1, always)
        replace("link", "link", 1, lambda source, path, *_: not os.path.lexists(path))
        replace("unlink", "unlink", 0, is_there)
        replace("remove", "unlink", 0, is_there)
        replace("mkdir", "mkdir", 0, lambda path, *_: not os.path.lexists(path))
        replace("rmdir", "rmdir", 0, lambda path, *_: os.path.isdir(path) and not os.listdir(path))
        replace("truncate", "truncate", 0, is_there)
        replace("ftruncate", "truncate", 0, always)
        creates = os.O_CREAT
        replace("open", "create", 0, lambda path, flags, *_: bool(flags & creates) and not os.path.lexists(path))
        for name in ("write", "pwrite"):
            self._intercept_write(name)

    def _intercept_write(self, name: str) -> None:
        """Replace os.write or os.pwrite, whose torn kind writes the first half of the bytes."""
        original = getattr(os, name)

        def intercepted(descriptor: int, data: Any, *offset: int) -> int:
            def write(part: Any) -> int:
                return original(descriptor, part, *offset)

            file = self.name(descriptor)
            if file is None:
                return write(data)
            half = memoryview(data).cast("B")[: len(data) // 2]
            return self.perform("write", file, lambda: write(data), len(data), lambda: write(half))

        setattr(os, name, intercepted)

    def _intercept_open(self) -> None:
        """Replace `open`, so that files that are written are `WatchedFile`s below their buffers."""
        original = builtins.open

        def intercepted(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            *rest: Any,
            **options: Any,
        ) -> Any:
            is_read = not set(mode) & set("wax+")
            if is_read or isinstance(file, int) or self.name(file) is None:
                return original(file, mode, buffering, encoding, errors, newline, *rest, **options)
            raw = WatchedFile(self, file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        builtins.open = io.open = intercepted

    def _intercept_s3(self) -> None:
        """Number the requests of every S3 client that a store makes from now on."""
        make_client = electra_dist.store.s3.requests.make_client
        request = threading.local()  # .moment of the kill in the request that this thread is sending

        def before(model: Any, params: dict[str, Any], **_: Any) -> None:
            kind = STORING_REQUESTS.get(model.name)
            request.moment = None
            if kind is None:
                return
            path = params["url_path"].partition("?")[0]
            if model.name == "DeleteObjects":  # The keys are in the body; the first one names the operation.
                path = params["body"].decode().partition("<Key>")[2].partition("</Key>")[0]
            key = _RANDOM.sub("*", path.partition(self._s3_prefix)[2])
            part = params["query_string"].get("partNumber")
            request.moment = self._number(kind, f"s3:{key}" + (f" part {part}" if part else ""), 0)
            if request.moment == "before":
                die()

        def after(**_: Any) -> None:
            if request.moment == "after":
                die()

        def make_watched_client(*arguments: Any) -> Any:
            client = make_client(*arguments)
            client.meta.events.register("before-call.s3", before)
            client.meta.events.register("after-call.s3", after)
            return client

        electra_dist.store.s3.requests.make_client = make_watched_client

    def _intercept_azure(self) -> None:
        """Let the obstore clients that stores make from now on send their requests through a proxy in this process.

        obstore is compiled: no function of Python sees its requests.
        """
        new_client = CloudStore._new_client

        def make_watched_client(store: CloudStore) -> Any:
            assert store._endpoint_url is not None
            upstream = store._endpoint_url
            proxy = _Proxy(
                ("127.0.0.1", 0),
                type("Handler", (_ProxyHandler,), {"log": self, "upstream": urlsplit(upstream).netloc}),
            )
            threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
            store._endpoint_url = f"http://127.0.0.1:{proxy.server_port}{urlsplit(upstream).path}"
            try:
                return new_client(store)
            finally:
                store._endpoint_url = upstream

        CloudStore._new_client = make_watched_client  # type: ignore[method-assign]

    def number_blob_request(self, method: str, path: str, body: bytes) -> Moment | None:
        """Add a request for Azure to the log, if it stores or deletes something; return when to kill this process."""
        url = urlsplit(path)
        query = parse_qs(url.query)
        kind = BLOB_REQUESTS.get((method, query.get("comp", [""])[0]))
        if kind is None:
            return None
        named = body.decode().partition("DELETE ")[2].partition(" ")[0] if method == "POST" else url.path
        key = _RANDOM.sub("*", unquote(named).partition(self._s3_prefix)[2])
        return self._number(kind, f"az:{key}", 0)  # the names of parts are random


class _Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True


class _ProxyHandler(ForwardingHandler):
    """Kills this process before or after the request that the log says."""

    log: OperationLog

    @override
    def ask_upstream(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        moment = self.log.number_blob_request(self.command, self.path, body)
        if moment == "before":
            die()
        answer = super().ask_upstream(body)
        if moment == "after":
            die()
        return answer


class WatchedFile(io.FileIO):
    """File without a buffer whose creation, writes and truncations are operations of a log."""

    def __init__(self, log: OperationLog, path: Any, mode: str) -> None:
        """Open the file; creating it, or emptying one that has content, is an operation."""
        self._log = log
        name = log.name(path)
        assert name is not None
        self._file_name = name
        is_new = not os.path.lexists(path)

        def open_file() -> None:
            super(WatchedFile, self).__init__(path, mode)

        if is_new:
            log.perform("create", name, open_file)
        elif "w" in mode and os.path.getsize(path):
            log.perform("truncate", name, open_file)
        else:
            log.inside(open_file)

    def write(self, data: Any) -> int:
        """Write bytes; the torn kind writes the first half of them."""

        def write(part: Any) -> int:
            return super(WatchedFile, self).write(part)

        view = memoryview(data).cast("B")
        half = view[: len(view) // 2]
        return self._log.perform("write", self._file_name, lambda: write(view), len(view), lambda: write(half))

    def truncate(self, size: int | None = None) -> int:
        """Cut the file off."""
        return self._log.perform("truncate", self._file_name, lambda: super(WatchedFile, self).truncate(size))


def die() -> NoReturn:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal may arrive a moment after the call
        signal.pause()
