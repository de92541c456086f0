"""Simulate nodes that fetch a corpus over one link to the store, for `shard_cache.py`.

How: one process serves the corpus over HTTP and limits the bytes per second of all nodes together. Each node is a
process, forked from the script, with its own cache folder. It reads the batches of its rank and, after each batch,
sleeps for the length of a step. A node reports through its own pipe, because a queue that processes share has a lock,
which a killed node might never release.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import Json

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.peer_group import Address, PeerGroup
from electra_dist.data.shard_cache import ShardCache
from electra_dist.data.shard_server import ShardServer
from electra_dist.store.atomic_files import replacing
from electra_dist.store.local_store import LocalStore

_FORK = multiprocessing.get_context("fork")
_CHUNK = 16 << 10  # bytes that the link lets through at a time
_LONGEST_S = 180.0  # longest wait for a report of any node
_SEED = 42
_TOKEN = "benchmark"  # by which the nodes' shard servers accept requests of one another
_BATCHES_PER_WINDOW = 12  # steps in which the rows of a shuffle window are used


class Cluster(NamedTuple):
    """Sizes of a simulated run: nodes, corpus, shuffle window and step."""

    num_nodes: int
    num_shards: int
    rows_per_shard: int
    window_shards: int  # shards whose rows are shuffled together
    step_s: float  # length of a step, in which a node sleeps
    seq_len: int = 512

    @property
    def global_batch(self) -> int:
        """Return the rows of a step: a multiple of the nodes, about 1 / `_BATCHES_PER_WINDOW` of a window."""
        rows = self.window_shards * self.rows_per_shard // _BATCHES_PER_WINDOW
        return max(self.num_nodes, rows - rows % self.num_nodes)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of whole steps in an epoch."""
        return self.num_shards * self.rows_per_shard // self.global_batch


class Run(NamedTuple):
    """One simulated run of the nodes."""

    name: str
    link_share: float  # Rate of the link as a share of the need, at which nodes that share nothing never wait.
    is_sharing: bool = True  # Whether the nodes pass shards to one another.
    kills_one: bool = False  # Whether the last node is killed when the first epoch is half over.
    cache_share: float | None = None  # Size of each cache as a share of the corpus; None for no limit.
    num_epochs: int = 1


class CountingStore(LocalStore):
    """Store in a local folder that must be copied from, as S3 must, and counts the fetched objects."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_fetched = 0

    def local_path(self, key: str) -> None:  # type: ignore[override]
        """Return None, so that the cache fetches objects instead of reading them in place."""
        return None

    def fetch(self, key: str, destination: Path) -> None:
        """Copy an object, and count it."""
        self.num_fetched += 1
        with replacing(destination) as out, super().local_path(key).open("rb") as stream:
            shutil.copyfileobj(stream, out)


class LinkedStore(CountingStore):
    """Store whose objects are fetched from `_serve_corpus` over HTTP, at the rate of the link."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder)
        self._port = port

    def fetch(self, key: str, destination: Path) -> None:
        """Copy an object over HTTP."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_LONGEST_S)
        with contextlib.closing(connection), replacing(destination) as out:
            connection.request("GET", f"/{key}")
            shutil.copyfileobj(connection.getresponse(), out)


class _Link:
    """Limit on the bytes per second that all connections together may send. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def pass_through(self, num_bytes: int) -> None:
        """Wait until the link has carried `num_bytes`, which follow the bytes of all earlier calls."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.monotonic()))


def _serve_corpus(folder: Path, bytes_per_s: float, num_sent: Any, port: Connection) -> None:
    """Serve the files of a folder over HTTP at a limited rate, until this process is killed.

    `num_sent` is a shared counter of the sent bytes, which only this process changes; `port` receives the port.
    """
    link = _Link(bytes_per_s)
    counting = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (folder / self.path.lstrip("/")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The node was killed.
                for first in range(0, len(data), _CHUNK):
                    chunk = data[first : first + _CHUNK]
                    link.pass_through(len(chunk))
                    self.wfile.write(chunk)
                    with counting:
                        num_sent.value += len(chunk)

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing, instead of a line for each request."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


def _run_node(
    node: int, cluster: Cluster, run: Run, store: LinkedStore, folder: Path, limit_bytes: int | None,
    script: Connection, num_sent: Any,
) -> None:  # fmt: skip
    """Read the batches of one node, which has a single rank, and report to the script; the main function of a process.

    `folder` and `limit_bytes` are those of the cache. `script` receives the reports (kind, value), and sends the
    addresses of all nodes once all nodes are ready. `num_sent` counts the bytes that have left the store.
    """
    manifest = read_manifest(LocalStore(Path(store.url)))
    order = RowOrder([CorpusOrder([entry.rows for entry in manifest.shards], _SEED, cluster.window_shards)])
    server = ShardServer("127.0.0.1", _TOKEN)
    script.send(("address", server.address))
    addresses = [Address(*address) for address in script.recv()]
    peers = PeerGroup(addresses, node, _TOKEN) if run.is_sharing else None
    begin = time.monotonic()
    cache = ShardCache(Corpora.of(store, manifest), folder, fetch_threads=4, limit_bytes=limit_bytes, peers=peers)
    server.serve(cache.node_cache, cache.corpora, fetch_threads=4)
    batch = cluster.global_batch
    loader = RowLoader(cache, order, batch, node, cluster.num_nodes, start_step=0)
    rows_per_node = batch // cluster.num_nodes
    first_row = node * rows_per_node  # first row of the node in each step
    first_batch_s = 0.0
    first_wait_s = 0.0
    is_killed = run.kills_one and node == cluster.num_nodes - 1
    for step in range(run.num_epochs * cluster.steps_per_epoch):
        row_ids = loader.next().row_ids
        if step == 0:
            first_batch_s = time.monotonic() - begin
            first_wait_s = loader.wait_s
        _, shards, rows = order.locate(step * batch + first_row + np.arange(rows_per_node))
        if not np.array_equal(row_ids, order.row_ids(shards, rows)):
            script.send(("error", f"step {step} has other rows than the order gives it"))
            return
        if (step + 1) % cluster.steps_per_epoch == 0:
            script.send(("epoch", num_sent.value))
        if is_killed and step == cluster.steps_per_epoch // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(cluster.step_s)
    run_s = time.monotonic() - begin - first_batch_s
    script.send(("end", (first_batch_s, (loader.wait_s - first_wait_s) / run_s)))
    time.sleep(_LONGEST_S)  # Other nodes may still ask this node for shards; the script kills the process.


def measure_nodes(run: Run, corpus: Path, folder: Path, cluster: Cluster) -> Json:
    """Run all nodes until each has read its epochs; their caches are in `folder`.

    Return `first_batch_s`, the seconds to the first batch of the slowest node; `waiting_share`, the mean share of the
    time after the first batch in which a node waits for rows; and `store_share_by_epoch`, the bytes that the store
    sent in each epoch, divided by the bytes of the corpus.
    """
    corpus_bytes = sum(entry.bytes for entry in read_manifest(LocalStore(corpus)).shards)
    epoch_s = cluster.steps_per_epoch * cluster.step_s
    bytes_per_s = run.link_share * cluster.num_nodes * corpus_bytes / epoch_s
    limit_bytes = None if run.cache_share is None else round(run.cache_share * corpus_bytes)
    num_sent = _FORK.RawValue("q", 0)
    port, port_of_store = _FORK.Pipe(duplex=False)
    processes = [_start(_serve_corpus, corpus, bytes_per_s, num_sent, port_of_store)]
    nodes: list[Connection] = []
    try:
        store = LinkedStore(corpus, port.recv())
        for node in range(cluster.num_nodes):
            ours, theirs = _FORK.Pipe()
            arguments = (node, cluster, run, store, folder / f"node-{node}", limit_bytes, theirs, num_sent)
            processes.append(_start(_run_node, *arguments))
            theirs.close()  # Otherwise the end of the node's process would not close the pipe.
            nodes.append(ours)
        reported = _follow(nodes, num_killed=1 if run.kills_one else 0)
    finally:
        for process in processes:
            process.kill()
            process.join()
    sent_bytes = [max(values) for values in zip(*reported["epoch"].values(), strict=True)]
    first_batches, waiting_shares = zip(*reported["end"].values(), strict=True)
    return {
        "name": run.name,
        "link_bytes_per_s": bytes_per_s,
        "first_batch_s": max(first_batches),
        "waiting_share": float(np.mean(waiting_shares)),
        "store_share_by_epoch": (np.diff([0, *sent_bytes]) / corpus_bytes).tolist(),
    }


def _start(function: Callable[..., None], *arguments: Any) -> Any:
    process = _FORK.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def _follow(nodes: list[Connection], num_killed: int) -> dict[str, dict[int, Any]]:
    """Let the nodes begin once all of them listen, and collect their reports until all have ended.

    Return kind of report -> number of the node -> value. For `epoch` the value is a list with one entry per epoch. A
    killed node has no `end`. The program ends if a node reports an error, ends too early, or none reports any more.
    """
    reported: dict[str, dict[int, Any]] = {"address": {}, "epoch": {}, "end": {}}
    living = dict(enumerate(nodes))
    while len(reported["end"]) < len(nodes) - num_killed:
        ready = wait(list(living.values()), timeout=_LONGEST_S)
        if not ready:
            raise SystemExit(f"no node has reported for {_LONGEST_S:.0f} s; see the errors above")
        for node in [number for number, connection in living.items() if connection in ready]:
            try:
                kind, value = living[node].recv()
            except EOFError:
                del living[node]
                if len(living) < len(nodes) - num_killed:
                    raise SystemExit(f"node {node} has ended; see the error above") from None
                continue
            if kind == "error":
                raise SystemExit(f"node {node}: {value}; correct the loader or the cache")
            if kind == "epoch":
                reported["epoch"].setdefault(node, []).append(value)
            else:
                reported[kind][node] = value
            if kind == "address" and len(reported["address"]) == len(nodes):
                addresses = [reported["address"][number] for number in range(len(nodes))]
                for connection in nodes:
                    connection.send(addresses)
    return reported
