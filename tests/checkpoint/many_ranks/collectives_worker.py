"""Count the collectives of a start, a save and a restore by rank 0 of a group in which nothing is sent.

    python collectives_worker.py FOLDER NUM_RANKS...

A process of its own, because DeepSpeed remembers the process group of the session in which the tests run. What rank 0
gathers from any other rank is a copy of its own value.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import checkpoints as small
from support import many_ranks
from support.counting_store import CountingStore, Service
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.checkpoint.restore_state import load_newest
from electra_dist.collectives import from_rank_0

COLLECTIVES = {name: getattr(distributed_c10d, name) for name in ("broadcast", "all_gather", "all_reduce")}


def counted_collectives(counts: Counter[str]) -> None:
    """Replace torch's collectives by some that count their calls, and the bytes that this rank contributes."""
    for name, collective in COLLECTIVES.items():

        def call(*arguments: Any, name: str = name, collective: Any = collective, **options: Any) -> Any:
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            counts[name] += 1
            counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
            return collective(*arguments, **options)

        setattr(distributed_c10d, name, call)


def measure(folder: Path, num_ranks: int) -> dict[str, dict[str, int]]:
    """Return the counts after a start, after a save and after a restore, and check what the restore has found."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    counts: Counter[str] = Counter()
    counted_collectives(counts)
    service = Service()
    store = CountingStore(service)
    assert from_rank_0(lambda: begin_attempt([store], many_ranks.RUN)) == 1
    after_start = dict(counts)
    many_ranks.save(service, folder, small.state_at(10, world_size=num_ranks))
    after_save = dict(counts)
    fragments = small.share(small.empty(), 0, num_ranks)
    found, notes = load_newest([store], fragments, small.state_at(0, world_size=num_ranks))
    assert found is not None and found.step == 10 and notes == []
    dist.destroy_process_group()
    return {"start": after_start, "save": after_save, "restore": dict(counts)}


def main() -> None:
    """Print a JSON object: the number of ranks -> the counts."""
    folder, *sizes = sys.argv[1:]
    os.fsync = lambda descriptor: None  # the disk is not what is counted
    results = {}
    for size in sizes:
        own_folder = Path(folder) / size
        own_folder.mkdir()
        results[size] = measure(own_folder, int(size))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
