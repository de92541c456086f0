"""Fetch shards from the caches of the other nodes of a run, so that each shard is fetched from S3 once, not per node.

The other nodes of the run are called peers; the store is the S3 prefix of the corpus.

Guarantee: a run needs no peer to go on. `PeerGroup.fetch` returns False if the peers are unreachable, slow or refuse,
and the caller then fetches from the store. The caller verifies the SHA-256 of what a peer has sent. The order of the
rows does not depend on where a shard comes from.

How: each shard has an owner, the node that fetches it from the store for all others, and further owners that replace
it. This order is a hash of shard and node (rendezvous hashing), so all nodes compute the same order. A node asks the
shard's first owner that has not just failed; if that is the node itself, it fetches from the store. When a node dies,
only its shards pass to other owners. While the owner is still fetching a shard, it answers with the number of bytes
that it has fetched so far (`shard_server.py`). The other node waits as long as this number grows, so a slow link to S3
does not make every node fetch everything.

Limits: the transfer is plain HTTP with a token of the run, so anybody who can read the cluster's network can read the
shards. All nodes must have the same list of nodes, which they exchange at each start.
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

from electra_dist.data.manifest import ShardEntry
from electra_dist.store.atomic_files import writable

PROGRESS_HEADER = "X-Bytes-Fetched"  # in an answer 202: number of bytes that the owner has fetched so far
_CONNECT_S = 3.0  # seconds within which a peer must accept a connection
_READ_S = 10.0  # seconds for which a peer may send nothing after a request; longer than a server holds a request
_STALLED_S = 20.0  # seconds without progress after which a node stops waiting for an owner that is still fetching
_LONGEST_S = 300.0  # seconds after which a node stops waiting for an owner, even if its fetch makes progress
_AWAY_S = 60.0  # seconds for which a peer that failed is not asked again
LEAST_BYTES_PER_S = 1e6  # a peer that sends more slowly than this has failed
_PAUSE_S = 0.05  # seconds between two requests for a shard that the owner is still fetching
_OWNERS_ASKED = 2  # number of peers that are asked for a shard before it is fetched from the store
_CHUNK = 1 << 20  # most bytes that are read at a time


class Address(NamedTuple):
    """Address at which a node serves its cache to the other nodes of the run."""

    host: str
    port: int


class PeerGroup:
    """Client with which a node fetches shards from the caches of the other nodes (peers). Thread-safe."""

    def __init__(self, addresses: Sequence[Address], own_node: int, token: str) -> None:
        """Take all nodes' addresses (in the same order everywhere), this node's index, and the token of requests."""
        assert 0 <= own_node < len(addresses)
        self.fetched_bytes = 0  # bytes of the shards that came from peers
        self._addresses = tuple(addresses)
        self._own_node = own_node
        self._token = token
        self._lock = threading.Lock()
        self._away_until: dict[int, float] = {}  # failed node -> `time.monotonic()` until which it is not asked
        self.owners = functools.lru_cache(maxsize=65_536)(self._owners)

    def _owners(self, digest: str) -> tuple[int, ...]:
        """Return the indices of all nodes in the order in which they are asked for a shard; the first is its owner."""

        def weight(node: int) -> bytes:
            return hashlib.blake2b(f"{digest} {node}".encode(), digest_size=8).digest()

        return tuple(sorted(range(len(self._addresses)), key=weight))

    def distance(self, digest: str) -> int:
        """Return a number for the shard with this SHA-256; this node fetches shards with lower numbers first.

        It is 0 for a shard that this node fetches from the store for all nodes, because other nodes wait for it.
        Otherwise it is the index of the node that does, minus this node's, modulo the number of nodes. So the nodes do
        not all ask one node first.
        """
        return (self.owners(digest)[0] - self._own_node) % len(self._addresses)

    def owned(self, digests: Sequence[str]) -> frozenset[str]:
        """Return those of `digests` (the SHA-256 of shards) that this node fetches from the store for all nodes."""
        return frozenset(digest for digest in digests if self.owners(digest)[0] == self._own_node)

    def fetch(self, entry: ShardEntry, destination: Path) -> bool:
        """Copy a shard from another node's cache into an existing file; return whether the whole shard has arrived.

        Its digest is not verified. After False, the file may hold a part, and the caller must ask the store.
        """
        num_asked = 0
        for node in self.owners(entry.sha256):
            if node == self._own_node or num_asked == _OWNERS_ASKED:
                return False
            with self._lock:
                is_away = time.monotonic() < self._away_until.get(node, 0.0)
            if is_away:
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

    def _ask(self, address: Address, entry: ShardEntry, destination: Path) -> bool:
        """Ask one peer for a shard until it has sent the shard; return False if it refuses or takes too long."""
        most_fetched_bytes = -1
        asked_at = time.monotonic()
        last_progress_at = asked_at
        while time.monotonic() < min(last_progress_at + _STALLED_S, asked_at + _LONGEST_S):
            connection = http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)
            try:
                answer = _request(connection, entry.sha256, self._token)
                if answer.status == http.client.OK and answer.length == entry.bytes:
                    _receive(answer, entry.bytes, destination)
                    with self._lock:
                        self.fetched_bytes += entry.bytes
                    return True
                if answer.status != http.client.ACCEPTED:
                    return False
                fetched_bytes = int(answer.headers.get(PROGRESS_HEADER, "0"))
            except ValueError:  # The number of fetched bytes is not a number.
                return False
            finally:
                connection.close()
            if fetched_bytes > most_fetched_bytes:
                most_fetched_bytes = fetched_bytes
                last_progress_at = time.monotonic()
            time.sleep(_PAUSE_S)
        return False


class _PeerFailure(Exception):
    """Failure of the connection to a peer, or a peer that sends too slowly."""


def _request(connection: http.client.HTTPConnection, digest: str, token: str) -> http.client.HTTPResponse:
    """Send the request for a shard and return the answer; raise _PeerFailure if the peer is away or silent."""
    try:
        connection.connect()
        connection.sock.settimeout(_READ_S)
        connection.request("GET", f"/{digest}", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse()
    except OSError as error:
        raise _PeerFailure(str(error)) from None


def _receive(answer: http.client.HTTPResponse, num_bytes: int, destination: Path) -> None:
    """Write the body of an answer to a file and sync it; raise _PeerFailure if it ends early or comes too slowly."""
    deadline = time.monotonic() + _READ_S + num_bytes / LEAST_BYTES_PER_S
    num_received = 0
    with writable(destination), destination.open("r+b") as out:
        while num_received < num_bytes:
            try:
                chunk = answer.read1(_CHUNK)
            except OSError as error:
                raise _PeerFailure(str(error)) from None
            if not chunk or time.monotonic() > deadline:
                raise _PeerFailure(f"{num_received} of {num_bytes} bytes were received")
            out.write(chunk)
            num_received += len(chunk)
        out.truncate()
        out.flush()
        os.fsync(out.fileno())
