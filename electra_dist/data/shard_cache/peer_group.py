"""Fetch shards from the caches of the other nodes of a run, so that each shard leaves S3 once and not once per node.

Guarantee: nothing depends on a peer. `PeerGroup.fetch` returns False whenever a peer is away, slow or refuses, and the
caller then fetches from the store; what a peer sends counts as a shard only after the caller has verified its SHA-256.
The order of the rows is not concerned.

How: every shard has an order of owners, a keyed hash over the nodes (rendezvous hashing), which all nodes compute
alike. A node asks the first owner that it has not found away; if that is the node itself, it fetches from the store.
So when a node dies, its shards pass to their next owners, and those of the others stay where they are. The owner
answers that the shard is still to come while it fetches it (`shard_server.py`), together with the number of bytes that
it has fetched so far. As long as this number grows, the node waits; so a slow link to S3 does not lead to every node
fetching everything.

Cost: one HTTP request a shard; a further one every two seconds while the owner is still fetching.

Limits: plain HTTP with a token of the run: who can read the cluster's network can read the shards. The nodes must
agree on the list of nodes, which they exchange at each start.
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.data.corpus_manifest import ShardEntry
from electra_dist.store.atomic_files import writable

PROGRESS_HEADER = "X-Bytes-Fetched"  # of an answer 202: bytes that the owner has fetched from the store so far
_CONNECT_S = 3.0  # seconds for which a peer may be silent when it is asked
_READ_S = 10.0  # seconds for which a peer may be silent while it sends or fetches; longer than it holds a request
_STALLED_S = 20.0  # seconds without progress after which an owner that is still fetching is given up
_LONGEST_S = 300.0  # seconds after which an owner that has not delivered a shard is given up, in spite of progress
_AWAY_S = 60.0  # seconds for which a peer that failed is not asked again
_LEAST_BYTES_PER_S = 1e6  # a peer that sends more slowly is given up
_PAUSE_S = 0.05  # seconds between two requests for a shard that the owner is still fetching
_OWNERS_ASKED = 2  # peers that are asked for a shard before it is fetched from the store
_CHUNK = 1 << 20  # bytes read at a time


class Address(NamedTuple):
    """Address at which a node serves its cache to the other nodes of the run."""

    host: str
    port: int


class PeerGroup:
    """The nodes of a run as sources of shards, seen from one of them. Thread-safe."""

    def __init__(self, addresses: Sequence[Address], own_node: int, token: str) -> None:
        """Remember the nodes; no connection is made until the first `fetch`.

        Args:
            addresses: Address of each node's server, in an order that all nodes share.
            own_node: Index of this node in `addresses`.
            token: Secret of this start of the run, which the servers ask for.
        """
        assert 0 <= own_node < len(addresses)
        self.fetched_bytes = 0  # bytes of the shards that came from peers
        self._addresses = tuple(addresses)
        self._own_node = own_node
        self._token = token
        self._lock = threading.Lock()
        self._away_until: dict[int, float] = {}  # node -> time of `time.monotonic` until which it is not asked
        self.owners = functools.lru_cache(maxsize=65_536)(self._owners)

    def _owners(self, digest: str) -> tuple[int, ...]:
        """Return the indices of all nodes in the order in which they own a shard, its first owner first.

        Args:
            digest: SHA-256 of the shard in hexadecimal.
        """

        def weight(node: int) -> bytes:
            return hashlib.blake2b(f"{digest} {node}".encode(), digest_size=8).digest()

        return tuple(sorted(range(len(self._addresses)), key=weight))

    def distance(self, digest: str) -> int:
        """Return the place of a shard in the order in which this node should fetch the shards of a window.

        0 is a shard that this node owns, for which other nodes wait. The numbers above it lead each node to another
        owner first, so that not all of them ask the same one at the same time.

        Args:
            digest: SHA-256 of the shard in hexadecimal.
        """
        return (self.owners(digest)[0] - self._own_node) % len(self._addresses)

    def owned(self, digests: Sequence[str]) -> frozenset[str]:
        """Return those of the shards whose first owner is this node."""
        return frozenset(digest for digest in digests if self.owners(digest)[0] == self._own_node)

    def fetch(self, entry: ShardEntry, destination: Path) -> bool:
        """Copy a shard from the cache of its owner into a file; return whether that has succeeded.

        The bytes are not verified. False means that this node is to fetch the shard from the store: it is the shard's
        owner itself, or the owners that were asked could not deliver.

        Args:
            entry: The shard's entry in the manifest.
            destination: Existing file whose content is replaced.

        Raises:
            StoreAway: The disk of this node is full or does not respond.
            StoreError: The file cannot be written for another reason.
        """
        num_asked = 0
        for node in self.owners(entry.sha256):
            if node == self._own_node or num_asked == _OWNERS_ASKED:
                return False
            if self._is_away(node):
                continue
            num_asked += 1
            try:
                if self._ask(self._addresses[node], entry, destination):
                    return True
            except (http.client.HTTPException, _PeerFailure):
                pass
            with self._lock:
                self._away_until[node] = time.monotonic() + _AWAY_S
        return False

    def _is_away(self, node: int) -> bool:
        """Return whether a node has failed so recently that it is not asked again."""
        with self._lock:
            return time.monotonic() < self._away_until.get(node, 0.0)

    def _ask(self, address: Address, entry: ShardEntry, destination: Path) -> bool:
        """Ask a peer for a shard, and again while it is fetching it; return whether the shard has come.

        Raises:
            _PeerFailure: The peer is away or too slow.
            HTTPException: Its answer is not HTTP, or ended early.
            StoreError: The file cannot be written.
        """
        progress = -1
        asked_at = time.monotonic()
        waits_since = asked_at
        while time.monotonic() < min(waits_since + _STALLED_S, asked_at + _LONGEST_S):
            connection = http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)
            try:
                answer = _request(connection, entry.sha256, self._token)
                if answer.status == http.client.OK:
                    if answer.length != entry.bytes:
                        return False
                    _receive(answer, entry.bytes, destination)
                    with self._lock:
                        self.fetched_bytes += entry.bytes
                    return True
                if answer.status != http.client.ACCEPTED:
                    return False
                fetched_bytes = int(answer.headers.get(PROGRESS_HEADER, "0"))
            except ValueError:
                return False
            finally:
                connection.close()
            if fetched_bytes > progress:
                progress = fetched_bytes
                waits_since = time.monotonic()
            time.sleep(_PAUSE_S)
        return False


class _PeerFailure(Exception):
    """The connection to a peer failed, or the peer is too slow."""


def _request(connection: http.client.HTTPConnection, digest: str, token: str) -> http.client.HTTPResponse:
    """Send the request for a shard over a new connection and return the peer's answer, whose body is not read yet.

    Raises:
        _PeerFailure: The peer cannot be reached or is silent.
        HTTPException: Its answer is not HTTP.
    """
    try:
        connection.connect()
        connection.sock.settimeout(_READ_S)
        connection.request("GET", f"/{digest}", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse()
    except OSError as error:
        raise _PeerFailure(str(error)) from None


def _receive(answer: http.client.HTTPResponse, num_bytes: int, destination: Path) -> None:
    """Write the body of an answer to a file and sync it to the disk.

    Raises:
        _PeerFailure: The connection broke, the body ended early, or it came more slowly than `_LEAST_BYTES_PER_S`.
        StoreError: The file cannot be written.
    """
    deadline = time.monotonic() + _READ_S + num_bytes / _LEAST_BYTES_PER_S
    num_received = 0
    with writable(destination), destination.open("r+b") as out:
        while num_received < num_bytes:
            try:
                chunk = answer.read1(_CHUNK)
            except OSError as error:
                raise _PeerFailure(str(error)) from None
            if not chunk or time.monotonic() > deadline:
                raise _PeerFailure(f"{num_received} of {num_bytes} bytes came")
            out.write(chunk)
            num_received += len(chunk)
        out.truncate()
        out.flush()
        os.fsync(out.fileno())
