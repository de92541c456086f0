"""Script of one rank of a run on two nodes that pass shards to one another; ranks 0 and 1 are on node 0, 2 on node 1.

The rank reads all rows of the corpus through the cache that a run opens, and prints its results as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from support.real_runs import synthetic_rows, tiny_tree
from support.remote_store import Remote

from electra_dist.config import Config
from electra_dist.data import peer_group
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import read_manifest
from electra_dist.engine.process_group import init_distributed
from electra_dist.store.open_store import open_store
from electra_dist.train.check_inputs import RunInputs
from electra_dist.train.open_cache import describe_caches, node_cache_folder, open_shared_cache

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
NODE, LOCAL_RANK, LOCAL_SIZE = [(0, 0, 2), (0, 1, 2), (1, 0, 1)][RANK]
os.environ["LOCAL_RANK"] = str(LOCAL_RANK)
os.environ["LOCAL_SIZE"] = str(LOCAL_SIZE)

rows_per_shard = json.loads(sys.argv[2])
shards = np.arange(len(rows_per_shard)).repeat(rows_per_shard)
rows = np.concatenate([np.arange(count) for count in rows_per_shard])
truth = np.concatenate([synthetic_rows(count, number) for number, count in enumerate(rows_per_shard)])


def read_all(share_shards: bool | None) -> dict[str, object]:
    """Read the corpus with an empty cache; return the fetched keys, the cache folder and the lines for the log."""
    directory = FOLDER / f"node-{NODE}-{share_shards}"
    directory.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(directory)
    tree = tiny_tree(FOLDER / "run", str(FOLDER / "corpus"), **{"data.share_shards": share_shards})
    config = Config.model_validate(tree)
    store = Remote(FOLDER / "corpus")
    corpora = Corpora.of(store, read_manifest(open_store(str(FOLDER / "corpus"))))
    inputs = RunInputs(  # the description of the caches uses nothing but the corpora
        config=config,
        notes=[],
        corpora=corpora,
        heldout=None,
        vocabulary=None,  # type: ignore[arg-type]
        identity={},
        targets=[],
        accept_new_numerics=False,
    )
    notes = describe_caches(config, inputs)
    with contextlib.ExitStack() as stack:
        cache = open_shared_cache(config, corpora, stack)
        cache.prefetch(range(len(rows_per_shard)))
        is_right = bool((cache.read_rows(shards, rows) == truth).all())
        dist.barrier()  # The servers go on until all ranks have their shards.
    folder = str(node_cache_folder(config).path)
    return {"right": is_right, "fetched": store.fetched, "folder": folder, "notes": notes}


for name in ("_CONNECT_S", "_READ_S", "_STALLED_S"):
    setattr(peer_group, name, 120.0)  # No node of a busy machine counts as away.
init_distributed()
print(json.dumps([read_all(share_shards) for share_shards in (True, None)]), flush=True)
dist.destroy_process_group()
