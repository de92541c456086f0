"""Serve the shards in this node's cache to the other nodes of the run, over HTTP.

Guarantee: the server sends only shards of the run's corpus, and only for requests with the token of this start of the
run. The socket is bound to one address, that of this node in the cluster's network. A shard that is not in the cache
yet is fetched by this node from the store of the corpus, once, however many nodes ask for it. Whoever has no token
takes at most 256 descriptors of this process (64 from one address), for five seconds each, and no thread.

How: one thread accepts all connections and reads the heads of their requests without blocking. A connection above the
limits takes the place of the oldest one that has not sent its request. A request with the token gets a thread. It is
held for up to two seconds until the shard is in the cache, and the file is then sent by the operating system
(sendfile). If the shard is still being fetched after that, or too many requests are being answered, the answer is 202
(Accepted), with the number of bytes that this node has fetched so far, so that the other node sees whether the fetch
makes progress. While a file is sent, a shared flock keeps the cache from deleting it.

Limits: the transfer is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import selectors
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from http import HTTPStatus

from electra_dist.data.corpora import Corpora, StoredShard
from electra_dist.data.node_cache import NodeCache
from electra_dist.data.peer_group import LEAST_BYTES_PER_S, PROGRESS_HEADER, Address
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import lock_file
from electra_dist.store.interface import fulfil

_HOLD_S = 2.0  # most seconds for which a request is held while its shard is being fetched
_SILENT_S = 30.0  # seconds after which an answer of which no byte can be sent is given up
_SCAN_S = 0.5  # seconds for which a count of the fetched bytes is reused before the folder is listed again
_POLL_S = 0.1  # longest time between two looks at the deadlines
_BACKLOG = 512  # Connections of many nodes come at the same time, when a window begins.
_HEAD_S = 5.0  # seconds within which a connection must have sent its whole request
_HEAD_BYTES = 4096  # most bytes of a request; one of another node has some 200
_MOST_WAITING = 256  # connections that have not sent their request
_MOST_WAITING_OF_ADDRESS = 64
_MOST_ANSWERED = 512  # requests with the token that are being answered
_MOST_ANSWERED_OF_ADDRESS = 128
_REQUEST = re.compile(rb"GET (\S+) HTTP/1\.[01]")
_TOKEN = re.compile(rb"authorization:[ \t]*Bearer (\S+)[ \t]*", re.IGNORECASE)
_PATH = re.compile(r"/([0-9a-f]{64})")


@dataclass
class _Connection:
    socket: socket.socket
    host: str
    deadline: float  # `time.monotonic()` at which it is closed
    head: bytearray = field(default_factory=bytearray)  # what has been received of the request


class ShardServer:
    """HTTP server of one node's cache for the other nodes of the run; the caller must call `close` at the end.

    The server listens from its creation on, so that its address can be sent to the other nodes. Until `serve` is
    called, it answers every request with 202 (Accepted): the other node asks again later.
    """

    def __init__(self, host: str, token: str) -> None:
        """Listen on a free port of `host`, this node's address in the cluster's network."""
        self._token = token.encode()
        self._served: _ServedCache | None = None
        self._listener = socket.create_server((host, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = Address(host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waiting: list[_Connection] = []  # without a whole request yet, the oldest first
        self._answered: list[_Connection] = []  # with the token, each in a thread of its own
        self._lock = threading.Lock()  # of `_answered`
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shard-server", daemon=True)
        self._thread.start()

    def serve(self, cache: NodeCache, corpora: Corpora, fetch_threads: int) -> None:
        """Serve the shards of corpora on S3 from now on; fetch missing ones, `fetch_threads` at a time."""
        self._served = _ServedCache(cache, corpora, fetch_threads)

    def close(self) -> None:
        """Stop accepting connections and requests. Answers that have begun go on in daemon threads."""
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        """Accept connections, read requests and close late connections until `close` is called; body of a thread."""
        with self._listener, self._selector:
            while not self._is_closed:
                # Requests are read before the next connection is accepted: who sends one at once is not displaced.
                events = self._selector.select(_POLL_S)
                for key, _ in events:
                    if key.data is not None:
                        self._read(key.data)
                if any(key.data is None for key, _ in events):
                    self._accept()
                self._close_late()
            for connection in list(self._waiting):
                self._drop(connection)

    def _accept(self) -> None:
        """Accept one connection. If too many have not sent a request yet, close the oldest of these."""
        try:
            accepted, (host, *_) = self._listener.accept()
        except OSError:  # It is gone again, or this process has no descriptor left.
            time.sleep(_POLL_S)
            return
        accepted.setblocking(False)
        of_host = [connection for connection in self._waiting if connection.host == host]
        if len(of_host) >= _MOST_WAITING_OF_ADDRESS:
            self._drop(of_host[0])
        elif len(self._waiting) >= _MOST_WAITING:
            self._drop(self._waiting[0])
        connection = _Connection(accepted, host, time.monotonic() + _HEAD_S)
        self._waiting.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        """Read what a connection has sent. Once its request is complete and has the token, answer it in a thread."""
        try:
            received = connection.socket.recv(_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        connection.head += received
        is_whole = b"\r\n\r\n" in connection.head
        if not is_whole:
            if not received or len(connection.head) > _HEAD_BYTES:
                self._drop(connection)
            return
        status, path = _parse_request(bytes(connection.head), self._token)
        if status is not HTTPStatus.OK:
            with contextlib.suppress(OSError):
                _send_head(connection.socket, status)
            self._drop(connection)
            return
        self._forget(connection)
        self._answer_in_thread(connection, path)

    def _answer_in_thread(self, connection: _Connection, path: str) -> None:
        """Answer a request in a new thread; if too many are being answered, tell the node that asks to come again."""
        connection.socket.settimeout(_SILENT_S)
        connection.deadline = time.monotonic() + _HOLD_S + _SILENT_S
        with self._lock:
            num_of_host = sum(other.host == connection.host for other in self._answered)
            is_busy = len(self._answered) >= _MOST_ANSWERED or num_of_host >= _MOST_ANSWERED_OF_ADDRESS
            if not is_busy:
                self._answered.append(connection)
        if is_busy:
            with contextlib.suppress(OSError), connection.socket:
                _send_head(connection.socket, HTTPStatus.ACCEPTED, self._served.fetched_bytes() if self._served else 0)
            return
        threading.Thread(target=self._answer, args=(connection, path), daemon=True).start()

    def _answer(self, connection: _Connection, path: str) -> None:
        """Answer a request for the shard at `path`, a URL path with its SHA-256; body of a thread.

        A broken connection is ignored: the node that asked then fetches the shard from the store of the corpus.
        """
        try:
            with contextlib.suppress(OSError), connection.socket:
                _answer_request(connection, path, self._served)
        finally:
            with self._lock:
                self._answered.remove(connection)

    def _close_late(self) -> None:
        """Close connections that have not sent a request in time, and cut off answers that take too long."""
        now = time.monotonic()
        for connection in [connection for connection in self._waiting if connection.deadline < now]:
            self._drop(connection)
        with self._lock:
            for connection in self._answered:
                if connection.deadline < now:
                    with contextlib.suppress(OSError):
                        connection.socket.shutdown(socket.SHUT_RDWR)  # Its thread then closes it.

    def _forget(self, connection: _Connection) -> None:
        self._waiting.remove(connection)
        self._selector.unregister(connection.socket)

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.socket.close()


class _ServedCache:
    """This node's cache, and the running fetches of shards that other nodes have asked for. Thread-safe."""

    def __init__(self, cache: NodeCache, corpora: Corpora, fetch_threads: int) -> None:
        self.cache = cache
        self.shards = {shard.entry.sha256: shard for shard in corpora.fetched_shards}
        self._lock = threading.Lock()
        self._fetches: dict[str, Future[None]] = {}  # by digest, of shards that are queued or being fetched
        self._slots = threading.Semaphore(fetch_threads)
        self._bytes_on_disk = 0
        self._fetched_bytes = 0
        self._counted_at = float("-inf")

    def wait_for(self, digest: str) -> None:
        """Wait until a shard is in the cache; fetch it if it is missing; raise FutureTimeout after `_HOLD_S` s."""
        shard = self.shards[digest]
        if self.cache.holds(shard.entry):
            return
        with self._lock:
            fetch = self._fetches.get(digest)
            if fetch is None:
                fetch = Future()
                self._fetches[digest] = fetch
                # Unlike those of an executor, a daemon does not keep a process that ends waiting for its download.
                threading.Thread(target=self._fetch, args=(shard, fetch), daemon=True).start()
        fetch.result(timeout=_HOLD_S)

    def _fetch(self, shard: StoredShard, fetch: Future[None]) -> None:
        """Fetch a shard as soon as fewer than `fetch_threads` fetches are running; the body of a thread."""
        with self._slots:
            # `wait_for` raises the error of this thread in the thread of each request.
            fulfil(fetch, lambda: self.cache.ensure(shard, verify=False, ask_peers=False))
        with self._lock:
            del self._fetches[shard.entry.sha256]  # A later request tries again.

    def fetched_bytes(self) -> int:
        """Return about how many bytes this node has fetched into its cache; the number never decreases."""
        with self._lock:
            # Other nodes only see whether the number grows. It sums up the growth of the folder, unfinished downloads
            # included, between two listings; files that are deleted in between make the growth smaller.
            if time.monotonic() - self._counted_at > _SCAN_S:
                bytes_on_disk = self.cache.bytes_on_disk()
                self._fetched_bytes += max(0, bytes_on_disk - self._bytes_on_disk)
                self._bytes_on_disk = bytes_on_disk
                self._counted_at = time.monotonic()
            return self._fetched_bytes


def _parse_request(head: bytes, token: bytes) -> tuple[HTTPStatus, str]:
    """Return OK and the path of a GET request that has the token; for another request, why it is refused, and ""."""
    request, *headers = head.partition(b"\r\n\r\n")[0].split(b"\r\n")
    tokens = [match[1] for match in map(_TOKEN.fullmatch, headers) if match is not None]
    if len(tokens) != 1 or not hmac.compare_digest(tokens[0], token):
        return HTTPStatus.FORBIDDEN, ""
    match = _REQUEST.fullmatch(request)
    if match is None:
        return HTTPStatus.BAD_REQUEST, ""
    return HTTPStatus.OK, match[1].decode("latin-1")


def _answer_request(connection: _Connection, path: str, served: _ServedCache | None) -> None:
    """Answer GET /<sha256>: 200 and the shard, 202 (being fetched), 404 (not of the corpus) or 503 (fetch failed)."""
    if served is None:
        time.sleep(_SCAN_S)
        _send_head(connection.socket, HTTPStatus.ACCEPTED)
        return
    match = _PATH.fullmatch(path)
    if match is None or match[1] not in served.shards:
        _send_head(connection.socket, HTTPStatus.NOT_FOUND)
        return
    entry = served.shards[match[1]].entry
    connection.deadline += entry.bytes / LEAST_BYTES_PER_S
    try:
        served.wait_for(entry.sha256)
        stream = served.cache.path(entry).open("rb")
    except (FutureTimeout, FileNotFoundError):
        # FileNotFoundError: the shard was deleted to make room after it had been fetched; the next request fetches it
        # again.
        _send_head(connection.socket, HTTPStatus.ACCEPTED, served.fetched_bytes())
        return
    except UserError:
        _send_head(connection.socket, HTTPStatus.SERVICE_UNAVAILABLE)
        return
    with stream:
        with contextlib.suppress(BlockingIOError):
            lock_file(stream, shared=True, wait=False)
        _send_head(connection.socket, HTTPStatus.OK, content_bytes=entry.bytes)
        connection.socket.sendfile(stream)


def _send_head(connection: socket.socket, status: HTTPStatus, fetched_bytes: int = 0, content_bytes: int = 0) -> None:
    lines = [f"HTTP/1.0 {status.value} {status.phrase}", f"Content-Length: {content_bytes}"]
    lines += [f"{PROGRESS_HEADER}: {fetched_bytes}", "", ""]
    connection.sendall("\r\n".join(lines).encode("ascii"))
