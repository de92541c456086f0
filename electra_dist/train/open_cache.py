"""Open this node's cache of shards for a run, let nodes pass shards to one another, and describe the cache in the log.

How: if `data.share_shards` is not set, nodes pass shards to one another in runs on 8 nodes or more. In a smaller run
every node fetches every shard from S3 itself, which spares an open port on each node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from electra_dist.collectives import from_rank_0, gather
from electra_dist.config import Config
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.node_cache import (
    GIGABYTE,
    SHARDS_DIR,
    CacheFolder,
    CacheRoom,
    NodeCache,
    choose_cache_folder,
    describe_room,
    windows_bytes,
)
from electra_dist.data.peer_group import Address, PeerGroup
from electra_dist.data.shard_cache import ShardCache, open_cache
from electra_dist.data.shard_server import ShardServer
from electra_dist.engine.rank_environment import rank_place
from electra_dist.run.this_node import node_name
from electra_dist.store.atomic_files import nearest_folder
from electra_dist.train.check_inputs import RunInputs

_FEWEST_SHARING_NODES = 8  # least number of nodes that pass shards to one another by default


def node_cache_folder(config: Config) -> CacheFolder:
    """Return the folder in which this node caches shards and compiled code, with the setting that chose it.

    If `data.cache_dir` is not set, a run on one node uses cache/ in the run folder, and a run on several nodes uses a
    folder in a temporary directory of each node.
    """
    has_several_nodes = rank_place().has_several_nodes
    return choose_cache_folder(config.data.cache_dir, config.cache_folder, has_several_nodes=has_several_nodes)


def shard_folder(config: Config, corpora: Corpora) -> Path:
    """Return the folder where this node caches the shards of `corpora`, if any of them are fetched from S3."""
    return node_cache_folder(config).path if corpora.fetched_shards else config.cache_folder


def open_shared_cache(config: Config, corpora: Corpora, stack: contextlib.ExitStack) -> ShardCache:
    """Return a new cache of the shards of `corpora` for this process, which `stack` closes. Collective.

    If the nodes pass shards to one another, the first rank of each node also starts a server for its node's cache.
    """
    server = None
    peers = None
    if corpora.fetched_shards and _shares_shards(config):
        server, peers = _meet_peers(stack)
    cache = open_cache(corpora, config.data, shard_folder(config, corpora), peers)
    stack.callback(cache.close)
    if server is not None:
        server.serve(cache.node_cache, corpora, config.data.fetch_threads)
    return cache


def _shares_shards(config: Config) -> bool:
    """Return whether the nodes of this run pass shards to one another, so that few fetch them from S3. Collective."""
    num_nodes = sum(gather(is_first_on_node()))
    if num_nodes == 1:
        return False
    if config.data.share_shards is None:
        return num_nodes >= _FEWEST_SHARING_NODES
    return config.data.share_shards


def is_first_on_node() -> bool:
    """Return whether this rank is the first of its node, which serves shards and deletes old files for the node."""
    return rank_place().local_rank == 0


def _meet_peers(stack: contextlib.ExitStack) -> tuple[ShardServer | None, PeerGroup | None]:
    """Start a server of shards on the first rank of each node; return this rank's server and a client of all servers.

    The server is None on the other ranks of a node. Both are None on a node that could not start one. `stack` closes
    the server. Collective.
    """
    token = from_rank_0(lambda: secrets.token_hex(16))
    server = None
    if is_first_on_node():
        with contextlib.suppress(OSError):  # then this node takes no part
            server = ShardServer(_own_address(), token)
            stack.callback(server.close)
    own_address: list[Any] | None = list(server.address) if server is not None else None
    addresses = gather(own_address)
    first_ranks = [rank for rank, is_first in enumerate(gather(is_first_on_node())) if is_first]
    # Ranks of one node have consecutive numbers, so the first rank of this node is the last one up to this rank.
    first_rank_of_node = max(rank for rank in first_ranks if rank <= dist.get_rank())
    servers = {rank: Address(*address) for rank, address in enumerate(addresses) if address is not None}
    if first_rank_of_node not in servers:  # its ranks fetch from the store, and other nodes do not ask it
        return None, None
    own_node = list(servers).index(first_rank_of_node)
    return server, PeerGroup(list(servers.values()), own_node, token)


def _own_address() -> str:
    """Return the IPv4 address that this node uses to reach MASTER_ADDR; raise OSError if there is none."""
    host = os.environ["MASTER_ADDR"]
    family, kind, protocol, _, target = socket.getaddrinfo(host, 1, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # This chooses the network for a datagram socket, and sends nothing.
        return str(probe.getsockname()[0])


def describe_caches(config: Config, inputs: RunInputs) -> list[str]:
    """Return log lines about the folders where nodes cache shards; [] if no corpus is on S3. Collective.

    The first line is about the node with the least room: its folder, whether the corpora fit into it, and if not, how
    much of them is fetched again in each epoch.
    """
    opened = [inputs.corpora] if inputs.heldout is None else [inputs.corpora, inputs.heldout]
    fetched = [shard.entry for corpora in opened for shard in corpora.fetched_shards]
    if not fetched:
        return []
    folder = node_cache_folder(config)
    room = _room(config, folder.path, fetched)
    node = node_name()
    rooms = gather([room.capacity_bytes, node, f"{folder.path} ({folder.source}), {describe_room(room)}"])
    _, name, text = min(rooms)
    num_nodes = sum(gather(is_first_on_node()))
    place = f" of {name}, which has the least room of the {num_nodes} nodes" if num_nodes > 1 else ""
    lines = [f"shard cache{place}: {text}"]
    if inputs.corpora.fetched_shards and _shares_shards(config):
        note = "pass shards to one another, so that each shard is fetched from S3 by one of them"
        lines.append(f"the {num_nodes} nodes {note}")
    return lines


def _room(config: Config, folder: Path, entries: Sequence[ShardEntry]) -> CacheRoom:
    """Return how many bytes this node's cache folder can hold, and how many the shards on S3 (`entries`) have."""
    cache = NodeCache(folder / SHARDS_DIR)
    held_bytes = sum(entry.bytes for entry in entries if cache.holds(entry))
    capacity_bytes = held_bytes + shutil.disk_usage(nearest_folder(folder)).free
    if config.data.cache_limit_gb is not None:
        capacity_bytes = min(capacity_bytes, round(config.data.cache_limit_gb * GIGABYTE))
    return CacheRoom(
        capacity_bytes=capacity_bytes,
        corpus_bytes=sum(entry.bytes for entry in entries),
        windows_bytes=windows_bytes([entry.bytes for entry in entries], config.data.shuffle_window_shards),
    )
