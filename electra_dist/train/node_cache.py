"""Open the cache of this node for a run, shared with the other nodes where that pays, and describe it in the log.

Without `data.share_shards`, the nodes share shards from 8 nodes on. With fewer, S3 serves the nodes side by side, and
a port that listens on each of them is not worth it; with more, each shard would leave S3 eight times and more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from pathlib import Path

import torch.distributed as dist

from electra_dist.collectives import from_rank_0, gather
from electra_dist.config import Config
from electra_dist.data.shard_cache.cache_folder import CacheFolder, choose_cache_folder
from electra_dist.data.shard_cache.cache_room import GIGABYTE, CacheRoom, describe_room, windows_bytes
from electra_dist.data.shard_cache.peer_group import PeerGroup
from electra_dist.data.shard_cache.shard_server import ShardServer
from electra_dist.data.verified_shards import ShardCache
from electra_dist.engine.process_group import ranks_on_this_node
from electra_dist.run.node_strikes import node_name
from electra_dist.train.input_checks import OpenCorpus, RunInputs

_FEWEST_SHARING_NODES = 8  # nodes from which on shards are shared by default


def node_cache_folder(config: Config) -> CacheFolder:
    """Return the folder in which this node caches shards and compiled code, and why it is that one.

    It is `data.cache_dir` if that is set; otherwise cache/ in the run folder, or a folder in a temporary directory of
    the node if the run has several nodes. The launcher's environment variables give the numbers of ranks.

    Raises:
        StoreError: this node has no temporary directory that can be used.
    """
    return choose_cache_folder(config.data.cache_dir, config.cache_folder, has_several_nodes=has_several_nodes())


def has_several_nodes() -> bool:
    """Return whether the launcher has started ranks on other nodes, too, by its environment variables."""
    return int(os.environ.get("WORLD_SIZE", "1")) > ranks_on_this_node()


def shard_folder(config: Config, corpus: OpenCorpus) -> Path:
    """Return the folder in which this node caches the shards of a corpus.

    For a corpus that is read in place, whose shards are not cached, the result is a path that nobody creates or reads.

    Raises:
        StoreError: the corpus is on S3, and this node has no temporary directory that can be used.
    """
    return node_cache_folder(config).path if _is_fetched(corpus) else config.cache_folder


def open_shared_cache(config: Config, corpus: OpenCorpus, stack: contextlib.ExitStack) -> ShardCache:
    """Return a new cache of a corpus's shards for this process; the nodes share shards if they are to. Collective.

    Args:
        config: gives the folder, its limit, and whether shards are shared.
        corpus: the opened corpus.
        stack: closes the cache and the server by which this node passes shards on.
    """
    server = None
    peers = None
    if _is_fetched(corpus) and _shares_shards(config):
        server, peers = _meet_peers(stack)
    cache = corpus.open_cache(config.data, shard_folder(config, corpus), peers)
    stack.callback(cache.close)
    if server is not None:
        server.serve(cache.node_cache, corpus.store, corpus.manifest, config.data.fetch_threads)
    return cache


def _shares_shards(config: Config) -> bool:
    """Return whether the nodes of this run pass shards to one another. Collective."""
    num_nodes = sum(gather(is_first_on_node()))
    if num_nodes == 1:
        return False
    if config.data.share_shards is None:
        return num_nodes >= _FEWEST_SHARING_NODES
    return config.data.share_shards


def is_first_on_node() -> bool:
    """Return whether this is the first rank of its node, which serves the node's cache and clears its folders."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _meet_peers(stack: contextlib.ExitStack) -> tuple[ShardServer | None, PeerGroup | None]:
    """Start a server on each node, and exchange the addresses and a new token. All ranks must call it.

    Args:
        stack: closes the server.

    Returns:
        The server, on the first rank of each node, and the nodes as this rank sees them. A node whose server cannot be
        started fetches all its shards from the store: its ranks get no peers, and the other nodes do not know it.
    """
    token = from_rank_0(lambda: secrets.token_hex(16))
    server = None
    if is_first_on_node():
        with contextlib.suppress(OSError):
            server = ShardServer(_own_address(), token)
            stack.callback(server.close)
    address_of_rank = gather(server.address if server is not None else None)
    first_ranks = [rank for rank, is_first in enumerate(gather(is_first_on_node())) if is_first]
    # The ranks of a node are numbered one after another.
    first_rank_here = max(rank for rank in first_ranks if rank <= dist.get_rank())
    address_of_serving_rank = {rank: address for rank in first_ranks if (address := address_of_rank[rank]) is not None}
    if first_rank_here not in address_of_serving_rank:
        return None, None
    own_node = list(address_of_serving_rank).index(first_rank_here)
    return server, PeerGroup(list(address_of_serving_rank.values()), own_node, token)


def _own_address() -> str:
    """Return the address of this node in the network through which it reaches the first node of the run.

    Raises:
        OSError: The name of the first node is unknown, or there is no way to it.
    """
    host = os.environ["MASTER_ADDR"]
    family, kind, protocol, _, target = socket.getaddrinfo(host, 1, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # Of a datagram socket, this sends nothing; it only chooses the network.
        return str(probe.getsockname()[0])


def describe_caches(config: Config, inputs: RunInputs) -> list[str]:
    """Return the lines for the log on the caches of shards; none without a corpus on S3. Collective.

    The first line is about the node that has the least room: its folder, and what follows if the corpora do not fit.
    A second one states that the nodes pass shards to one another, if they do.
    """
    corpora = [corpus for corpus in (inputs.corpus, inputs.heldout) if corpus is not None and _is_fetched(corpus)]
    if not corpora:
        return []
    folder = node_cache_folder(config)
    room = _room(config, folder.path, corpora)
    node = node_name()
    nodes = gather((room.capacity_bytes, node, f"{folder.path} ({folder.source}), {describe_room(room)}"))
    _, name, text = min(nodes)
    num_nodes = sum(gather(is_first_on_node()))
    place = f" of {name}, of {num_nodes} nodes the one with the least room" if num_nodes > 1 else ""
    lines = [f"shard cache{place}: {text}"]
    if _is_fetched(inputs.corpus) and _shares_shards(config):
        lines.append(f"the {num_nodes} nodes pass shards to one another, so that each is fetched from S3 once")
    return lines


def _is_fetched(corpus: OpenCorpus) -> bool:
    """Return whether the shards of a corpus are fetched and cached, and not read in place."""
    return corpus.store.local_path(corpus.manifest.shards[0].name) is None


def _room(config: Config, folder: Path, corpora: list[OpenCorpus]) -> CacheRoom:
    """Return how much of the corpora the cache folder of this node can hold.

    Args:
        config: gives the limit of the folder and the length of a shuffle window.
        folder: the cache folder, which need not exist.
        corpora: the corpora whose shards are fetched.
    """
    entries = [entry for corpus in corpora for entry in corpus.manifest.shards]
    held_bytes = sum(entry.bytes for entry in entries if (folder / f"{entry.sha256}.tar").exists())
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    capacity_bytes = held_bytes + shutil.disk_usage(existing).free
    if config.data.cache_limit_gb is not None:
        capacity_bytes = min(capacity_bytes, round(config.data.cache_limit_gb * GIGABYTE))
    return CacheRoom(
        capacity_bytes=capacity_bytes,
        corpus_bytes=sum(entry.bytes for entry in entries),
        windows_bytes=windows_bytes([entry.bytes for entry in entries], config.data.shuffle_window_shards),
    )
