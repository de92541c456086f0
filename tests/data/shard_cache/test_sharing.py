"""Nodes of a run pass shards to one another: fewer fetches, the same rows, and no dependence on any peer."""

from __future__ import annotations

import collections
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.remote_store import Remote

from electra_dist.data.loader import RowLoader
from electra_dist.data.row_order import RowOrder
from electra_dist.data.shard_cache import peer_group
from electra_dist.data.shard_cache.peer_group import Address, PeerGroup
from electra_dist.data.shard_cache.shard_server import ShardServer
from electra_dist.data.verified_shards import ShardCache
from electra_dist.store.open_store import open_store

NUM_SHARDS = 24
ROWS = 16  # of each shard
WINDOW = 6
BATCH = 32
TOKEN = "secret-of-the-run"


class Node:
    """Node with one rank: its server, its cache folder, and a store that records what the node fetches."""

    def __init__(self, corpus: Any, folder: Path, limit_bytes: int | None = None) -> None:
        self.corpus = corpus
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.remote = Remote(Path(corpus.store.url))
        self.server = ShardServer("127.0.0.1", TOKEN)
        self.cache: ShardCache | None = None

    def open(self, addresses: list[Address], own_node: int) -> ShardCache:
        peers = PeerGroup(addresses, own_node, TOKEN)
        self.cache = ShardCache(
            self.remote, self.corpus.manifest, self.folder, fetch_threads=2, limit_bytes=self.limit_bytes, peers=peers
        )
        self.server.serve(self.cache.node_cache, self.remote, self.corpus.manifest, fetch_threads=2)
        return self.cache

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()


@pytest.fixture
def large(build_corpus: Callable[..., Any], tmp_path: Path) -> Any:
    """Return a corpus of shards of equal sizes."""
    return build_corpus(open_store(str(tmp_path / "corpus")), [ROWS] * NUM_SHARDS)


@pytest.fixture
def make_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Node]]]:
    """Return a function that makes nodes which know one another: `make_nodes(corpus, 3)`.

    The nodes are closed at the end of the test. Their timeouts are long, so that none counts as failed on a busy
    machine.
    """
    for name in ("_CONNECT_S", "_READ_S", "_STALLED_S"):
        monkeypatch.setattr(peer_group, name, 60.0)
    with contextlib.ExitStack() as stack:

        def make(corpus: Any, num_nodes: int, limit_bytes: int | None = None) -> list[Node]:
            nodes = [Node(corpus, tmp_path / f"node-{number}", limit_bytes) for number in range(num_nodes)]
            for node in nodes:
                stack.callback(node.server.close)
                stack.callback(node.close)
            addresses = [node.server.address for node in nodes]
            for number, node in enumerate(nodes):
                node.open(addresses, number)
            return nodes

        yield make


def read_epochs(
    nodes: list[Node], num_epochs: int, on_step: Callable[[int], None] = lambda step: None
) -> list[np.ndarray]:
    """Read whole epochs on all nodes at the same time, one rank per node; return the rows of each step, all ranks."""
    corpus = nodes[0].corpus
    order = RowOrder([ROWS] * NUM_SHARDS, seed=3, window_shards=WINDOW)
    loaders = [
        RowLoader(node.cache, order, BATCH, rank, len(nodes), start_step=0)  # type: ignore[arg-type]
        for rank, node in enumerate(nodes)
    ]
    steps = []
    try:
        for step in range(num_epochs * order.rows_per_epoch // BATCH):
            on_step(step)
            batches = [loader.next() for loader in loaders]
            row_ids = np.concatenate([batch.row_ids for batch in batches])
            _, shards, rows = order.locate(np.arange(step * BATCH, (step + 1) * BATCH))
            assert (row_ids == order.row_ids(shards, rows)).all()
            ids = np.concatenate([batch.ids for batch in batches])
            assert (ids == corpus.rows[row_ids]).all()
            steps.append(ids)
    finally:
        for loader in loaders:
            loader.close()
    return steps


def fetches(nodes: list[Node]) -> collections.Counter[str]:
    """Return how often all nodes together have fetched each shard from the store."""
    return collections.Counter(name for node in nodes for name in node.remote.fetched)


def test_each_shard_is_fetched_once_for_all_nodes(large: Any, make_nodes: Callable[..., list[Node]]) -> None:
    nodes = make_nodes(large, 4)
    read_epochs(nodes, 2)
    assert fetches(nodes) == collections.Counter(entry.name for entry in large.manifest.shards)
    assert all(node.remote.fetched for node in nodes)  # each has fetched a part


def test_small_caches_of_several_nodes_hold_the_corpus_together(
    large: Any, make_nodes: Callable[..., list[Node]]
) -> None:
    """A cache holds only a part of the corpus, but four caches together hold all; later epochs fetch nothing."""
    size = large.manifest.shards[0].bytes
    nodes = make_nodes(large, 4, limit_bytes=(2 * WINDOW + NUM_SHARDS // 3) * size)
    read_epochs(nodes, 3)
    assert fetches(nodes).total() <= NUM_SHARDS + 2
    for node in nodes:
        assert len(list(node.folder.glob("*.tar"))) <= 2 * WINDOW + NUM_SHARDS // 3


def test_the_nodes_agree_on_the_owners_and_share_them_evenly() -> None:
    addresses = [Address("127.0.0.1", port) for port in range(1, 9)]
    groups = [PeerGroup(addresses, node, TOKEN) for node in range(8)]
    digests = [f"{number:064x}" for number in range(4000)]
    for digest in digests[:50]:
        assert len({group.owners(digest) for group in groups}) == 1
        assert sorted(group.distance(digest) for group in groups) == list(range(8))
    owned = [group.owned(digests) for group in groups]
    assert sum(map(len, owned)) == len(frozenset().union(*owned)) == 4000
    # Binomial(4000, 1/8) has mean 500 and standard deviation 21.
    assert all(abs(len(part) - 500) < 5 * 21 for part in owned)


def test_a_node_that_ends_in_the_middle_is_replaced_by_the_store(
    large: Any, make_nodes: Callable[..., list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of the last node ends during the first epoch; the next owners then fetch that node's shards."""
    nodes = make_nodes(large, 4)
    survivors = nodes[:3]
    gone = nodes[3]

    def end_one(step: int) -> None:
        if step == 3:
            gone.server.close()
            monkeypatch.setattr(gone.server, "close", lambda: None)

    read_epochs(nodes, 2, end_one)
    assert max(fetches(survivors).values()) == 1
    assert set(fetches(nodes)) == {entry.name for entry in large.manifest.shards}
    # The node that is gone for the others has still been reading, and fetched again what the others took over.
    assert fetches(nodes).total() < 2 * NUM_SHARDS


def test_wrong_bytes_of_a_peer_are_refused(large: Any, make_nodes: Callable[..., list[Node]]) -> None:
    """The files of one node are damaged after verification; the other node notices and fetches from the store."""
    nodes = make_nodes(large, 2)
    owner, asking = nodes
    assert owner.cache is not None
    assert asking.cache is not None
    for index in range(NUM_SHARDS):
        owner.cache.open(index)
    owner.cache.keep_only([])
    for path in owner.folder.glob("*.tar"):
        data = bytearray(path.read_bytes())
        data[700] ^= 1
        path.write_bytes(data)
    order = np.arange(NUM_SHARDS).repeat(ROWS)
    rows = asking.cache.read_rows(order, np.tile(np.arange(ROWS), NUM_SHARDS))
    assert (rows == large.rows).all()
    owned = PeerGroup([owner.server.address] * 2, 0, TOKEN).owned([entry.sha256 for entry in large.manifest.shards])
    assert asking.cache.refetches == len(owned) > 5


def answer_with(reply: Callable[[socket.socket], None], stack: contextlib.ExitStack) -> Address:
    """Listen on a free port, and call `reply` with each connection in a thread; return the address."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.recv(4096)
                with contextlib.suppress(OSError):
                    reply(connection)

    threading.Thread(target=work, daemon=True).start()
    return Address("127.0.0.1", listener.getsockname()[1])


WRONG_ANSWERS = {
    "silence": lambda connection: time.sleep(1),
    "no http": lambda connection: connection.sendall(b"hello\r\n\r\n") or connection.close(),
    "reset": lambda connection: connection.close(),
    "another length": lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n1234567"),
    "no length": lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n"),
    "error": lambda connection: connection.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"),
    "never done": lambda connection: connection.sendall(b"HTTP/1.1 202 Yes\r\nContent-Length: 0\r\n\r\n"),
    "no number": lambda connection: connection.sendall(b"HTTP/1.1 202 Yes\r\nX-Bytes-Fetched: x\r\n\r\n"),
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_a_peer_that_does_not_deliver_is_given_up(
    large: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    for name, seconds in {"_CONNECT_S": 0.2, "_READ_S": 0.2, "_STALLED_S": 0.3}.items():
        monkeypatch.setattr(peer_group, name, seconds)
    remote = Remote(Path(large.store.url))
    with contextlib.ExitStack() as stack:
        wrong = answer_with(WRONG_ANSWERS[answer], stack)
        peers = PeerGroup([Address("127.0.0.1", 1), wrong], 0, TOKEN)
        cache = ShardCache(remote, large.manifest, tmp_path / "cache", fetch_threads=1, peers=peers)
        stack.callback(cache.close)
        order = np.arange(NUM_SHARDS).repeat(ROWS)
        assert (cache.read_rows(order, np.tile(np.arange(ROWS), NUM_SHARDS)) == large.rows).all()
    assert collections.Counter(remote.fetched) == collections.Counter(entry.name for entry in large.manifest.shards)
    assert peers.fetched_bytes == 0


def test_only_requests_with_the_token_are_answered(large: Any, make_nodes: Callable[..., list[Node]]) -> None:
    (node,) = make_nodes(large, 1)
    digest = large.manifest.shards[0].sha256

    def status(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(*node.server.address, timeout=10)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    assert status(f"/{digest}") == 403
    assert status(f"/{digest}", Authorization="Bearer another") == 403
    assert node.remote.fetched == []  # nothing is fetched for strangers
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert status(f"/{digest}", **token) == 200
    for path in (f"/{'0' * 64}", "/../corpus.json", "/", f"/{digest}/"):
        assert status(path, **token) == 404
