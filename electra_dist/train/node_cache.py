"""Find the cache folder of this node for a run, and describe the caches of all nodes in the log."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from electra_dist.collectives import gather
from electra_dist.config import Config
from electra_dist.data.shard_cache.cache_folder import CacheFolder, choose_cache_folder
from electra_dist.data.shard_cache.cache_room import GIGABYTE, CacheRoom, describe_room, windows_bytes
from electra_dist.engine.process_group import ranks_on_this_node
from electra_dist.run.node_strikes import node_name
from electra_dist.train.input_checks import OpenCorpus, RunInputs


def node_cache_folder(config: Config) -> CacheFolder:
    """Return the folder in which this node caches shards and compiled code, and why it is that one.

    It is `data.cache_dir` if that is set; otherwise cache/ in the run folder, or a folder in a temporary directory of
    the node if the run has several nodes. The launcher's environment variables give the numbers of ranks.

    Raises:
        StoreError: this node has no temporary directory that can be used.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return choose_cache_folder(
        config.data.cache_dir, config.cache_folder, has_several_nodes=world_size > ranks_on_this_node()
    )


def describe_caches(config: Config, inputs: RunInputs) -> list[str]:
    """Return one line for the log on the cache of the node that has the least room for shards. Collective.

    The line names the folder and what follows if the corpora do not fit. It is empty without a corpus on S3.
    """
    corpora = [corpus for corpus in (inputs.corpus, inputs.heldout) if corpus is not None and _is_fetched(corpus)]
    if not corpora:
        return []
    folder = node_cache_folder(config)
    room = _room(config, folder.path, corpora)
    node = node_name()
    nodes = gather((room.capacity_bytes, node, f"{folder.path} ({folder.source}), {describe_room(room)}"))
    _, name, text = min(nodes)
    num_nodes = len({node for _, node, _ in nodes})
    place = f", on {name}, of {num_nodes} nodes the one with the least room" if num_nodes > 1 else ""
    return [f"shard cache{place}: {text}"]


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
