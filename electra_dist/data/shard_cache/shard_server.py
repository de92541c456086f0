"""Serve the shards in this node's cache to the other nodes of the run, over HTTP.

Guarantee: the server sends only shards of the run's corpus, and only for requests with the token of this start of the
run. The socket is bound to one address, that of this node in the cluster's network. A shard that is not in the cache
yet is fetched by this node from the store of the corpus, once, however many nodes ask for it.

How: a request is held for up to two seconds until the shard is in the cache, and the file is then sent. If the shard
is still being fetched after that, the answer is 202 (Accepted), with the number of bytes that this node has fetched so
far, so that the other node sees whether the fetch makes progress. While a file is sent, a shared flock keeps the cache
from deleting it.

Cost: a thread for each request; the file is sent by the operating system (sendfile).

Limits: the transfer is not encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import http.server
import re
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from http import HTTPStatus
from typing import Any

from electra_dist.data.corpus_manifest import CorpusManifest, ShardEntry
from electra_dist.data.node_disk_cache import NodeCache
from electra_dist.data.shard_cache.peer_group import PROGRESS_HEADER, Address
from electra_dist.errors import UserError
from electra_dist.store.interface import Store

_HOLD_S = 2.0  # most seconds for which a request is held while its shard is being fetched
_SILENT_S = 30.0  # seconds after which a connection over which no bytes pass is closed
_SCAN_S = 0.5  # seconds for which a count of the fetched bytes is reused before the folder is listed again
_PATH = re.compile(r"/([0-9a-f]{64})")


class ShardServer:
    """HTTP server of one node's cache for the other nodes of the run; the caller must call `close` at the end.

    The server listens from the moment it is created, so that its address can be sent to the other nodes. It sends
    shards once `serve` has been called; before that, its answer to every request is 202 (Accepted).
    """

    def __init__(self, host: str, token: str, port: int = 0) -> None:
        """Listen on a port, and answer requests in background threads.

        Args:
            host: Address of this node in the cluster's network; the server can be reached at this address only.
            token: Secret of this start of the run; requests without it get the answer 403 (Forbidden).
            port: TCP port to listen on; 0 means any free port.

        Raises:
            OSError: The address is not one of this node, or the port is in use.
        """
        self._token = token
        self._served: _ServedCache | None = None
        self._http = _HttpServer((host, port), _Handler)
        self._http.owner = self
        self.address = Address(host, self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def serve(self, cache: NodeCache, store: Store, manifest: CorpusManifest, fetch_threads: int) -> None:
        """Serve the shards of a corpus from now on; a shard that is not in the cache is fetched from the store.

        Args:
            cache: The cache of this node.
            store: Store of the corpus.
            manifest: Manifest of the corpus.
            fetch_threads: Number of shards that are fetched for other nodes at the same time.
        """
        self._served = _ServedCache(cache, store, manifest, fetch_threads)

    def close(self) -> None:
        """Stop listening and answering; fetches that have begun go on in threads that end with the process."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def is_allowed(self, authorization: str) -> bool:
        """Return whether the Authorization header of a request has the token of this start of the run."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    @property
    def served(self) -> _ServedCache | None:
        """Return the cache whose shards are sent to other nodes; None before `serve` is called."""
        return self._served


class _ServedCache:
    """The cache of this node, together with the fetches of shards that other nodes have asked for. Thread-safe."""

    def __init__(self, cache: NodeCache, store: Store, manifest: CorpusManifest, fetch_threads: int) -> None:
        """Prepare to fetch shards of a corpus; the arguments are those of `ShardServer.serve`."""
        self.cache = cache
        self.entries = {entry.sha256: entry for entry in manifest.shards}
        self._store = store
        self._lock = threading.Lock()
        self._fetches: dict[str, Future[None]] = {}  # by digest, of shards that are queued or being fetched
        self._slots = threading.Semaphore(fetch_threads)
        self._bytes_on_disk = 0
        self._fetched_bytes = 0
        self._counted_at = float("-inf")

    def wait_for(self, digest: str) -> None:
        """Wait up to `_HOLD_S` seconds until a shard is in the cache; start a thread that fetches it if necessary.

        Args:
            digest: SHA-256 of the shard in hexadecimal, a key of `entries`.

        Raises:
            UserError: The shard cannot be fetched.
            FutureTimeout: The shard is still being fetched.
        """
        entry = self.entries[digest]
        if self.cache.holds(entry):
            return
        with self._lock:
            fetch = self._fetches.get(digest)
            if fetch is None:
                fetch = Future()
                self._fetches[digest] = fetch
                # Unlike those of an executor, a daemon does not keep a process that ends waiting for its download.
                threading.Thread(target=self._fetch, args=(entry, fetch), daemon=True).start()
        fetch.result(timeout=_HOLD_S)

    def _fetch(self, entry: ShardEntry, fetch: Future[None]) -> None:
        """Fetch a shard from the store as soon as fewer than `fetch_threads` fetches are running.

        This is the body of a thread. `fetch` receives None when the shard is in the cache, or the error.
        """
        with self._slots:
            try:
                self.cache.ensure(self._store, entry, verify=False, ask_peers=False)
            except BaseException as error:  # noqa: BLE001 - `wait_for` raises it in the thread of each request.
                fetch.set_exception(error)
            else:
                fetch.set_result(None)
        with self._lock:
            del self._fetches[entry.sha256]  # A later request tries again.

    def fetched_bytes(self) -> int:
        """Return about how many bytes this node has fetched into its cache; the number never decreases.

        Other nodes use it only to see whether it grows. It is the sum of the growth of the cache folder, unfinished
        downloads included, from one listing to the next. Files that are deleted between two listings make the growth
        smaller, but it never counts as less than 0.
        """
        with self._lock:
            if time.monotonic() - self._counted_at > _SCAN_S:
                bytes_on_disk = self.cache.bytes_on_disk()
                self._fetched_bytes += max(0, bytes_on_disk - self._bytes_on_disk)
                self._bytes_on_disk = bytes_on_disk
                self._counted_at = time.monotonic()
            return self._fetched_bytes


class _HttpServer(http.server.ThreadingHTTPServer):
    """HTTP server that answers each request in a thread of its own; the threads do not keep the process alive."""

    daemon_threads = True
    request_queue_size = 512  # Connections of many nodes come at the same time, when a window begins.
    owner: ShardServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke, because the other node then fetches the shard from the store."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handler of one connection, over which another node asks for shards."""

    server: _HttpServer
    timeout = _SILENT_S

    def do_GET(self) -> None:
        """Answer the request GET /<sha256> with the shard (200), or with a status that explains why not.

        202: the shard is still being fetched. 403: the token is wrong. 404: the corpus has no such shard. 503: the
        shard cannot be fetched.
        """
        if not self.server.owner.is_allowed(self.headers.get("Authorization", "")):
            self._answer(HTTPStatus.FORBIDDEN)
            return
        served = self.server.owner.served
        if served is None:
            time.sleep(_SCAN_S)
            self._answer(HTTPStatus.ACCEPTED)
            return
        match = _PATH.fullmatch(self.path)
        if match is None or match[1] not in served.entries:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        digest = match[1]
        try:
            served.wait_for(digest)
            self._send_shard(served, digest)
        except (FutureTimeout, FileNotFoundError):
            # FileNotFoundError: the shard was deleted to make room after it had been fetched; the next request
            # fetches it again.
            self._answer(HTTPStatus.ACCEPTED, served.fetched_bytes())
        except UserError:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)

    def _send_shard(self, served: _ServedCache, digest: str) -> None:
        """Send the file of a shard, which a shared flock protects from deletion meanwhile.

        Raises:
            FileNotFoundError: The shard is no longer in the cache.
        """
        entry = served.entries[digest]
        with served.cache.path(entry).open("rb") as stream:
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(entry.bytes))
            self.end_headers()
            self.connection.sendfile(stream)

    def _answer(self, status: HTTPStatus, fetched_bytes: int = 0) -> None:
        """Send an answer without a body, with the number of bytes that this node has fetched in a header."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header(PROGRESS_HEADER, str(fetched_bytes))
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing, so that the requests of other nodes do not fill the log of this rank."""
