"""Count the collectives that rank 0 calls in a start, a save and a restore, in a simulated process group.

    python collectives_worker.py FOLDER NUM_RANKS...

How: torch's "fake" process group sends nothing, so one process can be rank 0 of any number of ranks. What rank 0
gathers from another rank is a copy of its own value. The counts are made in a process of their own, because DeepSpeed
keeps the process group of the process in which the tests run.
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
from electra_dist.checkpoint.reader import load_newest
from electra_dist.collectives import from_rank_0

COLLECTIVES = {name: getattr(distributed_c10d, name) for name in ("broadcast", "all_gather", "all_reduce")}


def count_collectives(counts: Counter[str]) -> None:
    """Replace torch's collectives in this process by functions that also count their calls.

    Args:
        counts: receives, under the name of each collective, its number of calls, and under "bytes" the bytes of all
            tensors that were passed to them directly.
    """
    for name, collective in COLLECTIVES.items():

        def counting(*arguments: Any, name: str = name, collective: Any = collective, **options: Any) -> Any:
            """Count a call of one collective, and call it."""
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            counts[name] += 1
            counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
            return collective(*arguments, **options)

        setattr(distributed_c10d, name, counting)
        setattr(dist, name, counting)


def measure(folder: Path, num_ranks: int) -> dict[str, dict[str, int]]:
    """Make a start, a save and a restore as rank 0 of `num_ranks` ranks, and return the counts of collectives.

    Args:
        folder: empty folder for the files of the save.
        num_ranks: number of ranks of the simulated group.

    Returns:
        "start", "save" and "restore" -> the counts since the beginning, as they were after that phase.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    counts: Counter[str] = Counter()
    count_collectives(counts)
    service = Service()
    store = CountingStore(service)
    assert from_rank_0(lambda: begin_attempt([store], many_ranks.RUN)) == 1
    after_start = dict(counts)
    many_ranks.save(service, small.state_at(10, world_size=num_ranks))
    after_save = dict(counts)
    fragments = small.share(small.empty(), 0, num_ranks)
    found, notes, _ = load_newest([store], fragments, small.state_at(0, world_size=num_ranks))
    assert found is not None
    assert found.step == 10
    assert notes == []
    dist.destroy_process_group()
    return {"start": after_start, "save": after_save, "restore": dict(counts)}


def main() -> None:
    """Measure for each number of ranks on the command line, and print a JSON object: number of ranks -> counts."""
    folder, *sizes = sys.argv[1:]
    os.fsync = lambda descriptor: None  # No test depends on the disk, and syncs would take most of the time.
    results = {}
    for size in sizes:
        own_folder = Path(folder) / size
        own_folder.mkdir()
        results[size] = measure(own_folder, int(size))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
