"""Nodes of a run pass shards to one another: fewer fetches, the same rows, and no dependence on any peer."""

from __future__ import annotations

import collections
import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.remote_store import Remote

from electra_dist.data import peer_group, shard_server
from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.peer_group import Address, PeerGroup
from electra_dist.data.shard_cache import ShardCache
from electra_dist.data.shard_server import ShardServer
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
        self.corpora = Corpora.of(self.remote, corpus.manifest)
        self.server = ShardServer("127.0.0.1", TOKEN)
        self.cache: ShardCache | None = None

    def open(self, addresses: list[Address], own_node: int) -> ShardCache:
        peers = PeerGroup(addresses, own_node, TOKEN)
        self.cache = ShardCache(
            self.corpora,
            self.folder,
            fetch_threads=2,
            limit_bytes=self.limit_bytes,
            peers=peers,
        )
        self.server.serve(self.cache.node_cache, self.corpora, fetch_threads=2)
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
    order = RowOrder([CorpusOrder([ROWS] * NUM_SHARDS, seed=3, window_shards=WINDOW)])
    loaders = [
        RowLoader(node.cache, order, BATCH, rank, len(nodes), start_step=0)  # type: ignore[arg-type]
        for rank, node in enumerate(nodes)
    ]
    steps = []
    try:
        for step in range(num_epochs * order.num_rows // BATCH):
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
    assert asking.cache.node_cache.refetches == len(owned) > 5


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
        cache = ShardCache(Corpora.of(remote, large.manifest), tmp_path / "cache", fetch_threads=1, peers=peers)
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


# Opens connections without the token: half of them stay silent, half send a byte now and then, and each one that the
# server closes is opened again, 50 at a time. It prints a line when all are open once, and ends with its input.
SILENT_CLIENTS = """
import contextlib, resource, select, socket, sys, time
count, ports = int(sys.argv[1]), [int(port) for port in sys.argv[2:]]
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
sockets = {}
begun = 0
while not select.select([sys.stdin], [], [], 0.05 if begun >= count else 0)[0]:
    again = 50
    for number in range(count):
        if number not in sockets:
            if begun >= count:
                again -= 1
                if again < 0:
                    continue
            sockets[number] = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 5)
            sockets[number].setblocking(False)
            begun += 1
            if begun == count:
                print("open", flush=True)
        try:
            if number // len(ports) % 2:
                sockets[number].send(b"G")
            if sockets[number].recv(100) == b"":
                raise ConnectionError
        except BlockingIOError:
            pass
        except OSError:
            sockets.pop(number).close()
"""


@contextlib.contextmanager
def silent_clients(count: int, *addresses: Address) -> Iterator[None]:
    """Keep connections of another process to servers open, none of which sends a request, while the block runs."""
    ports = [str(address.port) for address in addresses]
    command = [sys.executable, "-c", SILENT_CLIENTS, str(count), *ports]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"open\n"
            yield
        finally:
            process.kill()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.real_start
def test_a_thousand_silent_connections_take_no_thread_and_few_descriptors_and_the_run_goes_on(
    large: Any, make_nodes: Callable[..., list[Node]]
) -> None:
    nodes = make_nodes(large, 2)
    before, threads = num_descriptors(), threading.active_count()
    most = 0

    def look(step: int) -> None:
        nonlocal most
        most = max(most, num_descriptors())

    with silent_clients(1000, *[node.server.address for node in nodes]):
        assert threading.active_count() == threads
        read_epochs(nodes, 2, look)
        connection = http.client.HTTPConnection(*nodes[0].server.address, timeout=30)
        connection.request("GET", f"/{large.manifest.shards[0].sha256}", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200
        connection.close()
    assert most - before < 2 * (shard_server._MOST_WAITING_OF_ADDRESS + 1) + 60  # 60: files of shards, requests
    assert set(fetches(nodes)) == {entry.name for entry in large.manifest.shards}


def test_connections_without_a_whole_request_are_closed_in_time(
    large: Any, make_nodes: Callable[..., list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_server, "_HEAD_S", 0.2)
    (node,) = make_nodes(large, 1)
    before = num_descriptors()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(node.server.address, 5)) for _ in range(3)]
        _, slow, long = clients
        slow.sendall(b"GET /")
        long.sendall(b"GET /" + b"a" * 100_000)
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""  # closed without an answer
            client.close()
    deadline = time.monotonic() + 10
    while num_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_descriptors() == before


def test_one_address_does_not_displace_another_and_all_have_a_limit(
    large: Any, make_nodes: Callable[..., list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_server, "_HEAD_S", 600.0)
    monkeypatch.setattr(shard_server, "_MOST_WAITING_OF_ADDRESS", 4)
    monkeypatch.setattr(shard_server, "_MOST_WAITING", 6)
    (node,) = make_nodes(large, 1)

    def connect(host: str) -> socket.socket:
        client = socket.create_connection(node.server.address, 5, source_address=(host, 0))
        stack.callback(client.close)
        return client

    with contextlib.ExitStack() as stack:
        first = connect("127.0.0.2")
        many = [connect("127.0.0.3") for _ in range(9)]
        for closed in many[:5]:
            assert closed.recv(1) == b""
        others = [connect(f"127.0.1.{number}") for number in range(1, 4)]
        assert first.recv(1) == b""  # the oldest of all
        request = f"GET /{large.manifest.shards[0].sha256} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        for client in (many[-1], others[-1]):
            client.sendall(request.encode())
            assert client.recv(12) == b"HTTP/1.0 200"


def test_requests_above_the_limit_are_put_off(
    large: Any, make_nodes: Callable[..., list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_server, "_MOST_ANSWERED_OF_ADDRESS", 0)
    node, _ = make_nodes(large, 2)
    request = f"GET /{large.manifest.shards[0].sha256} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with socket.create_connection(node.server.address, 5) as client:
        client.sendall(request.encode())
        assert client.recv(12) == b"HTTP/1.0 202"
