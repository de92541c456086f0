"""Collectives of a start and a restore on a fake process group of 64, 512 and 1,024 ranks: their number and bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture(params=[64, 512, 1024])
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of ranks of a process group of which this process is rank 0, and in which nothing is sent.

    What rank 0 gathers from any other rank is a copy of its own value.
    """
    if dist.is_initialized():
        dist.destroy_process_group()  # that an earlier test of the session has not destroyed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of collectives of each kind, and the bytes that this rank contributes to them."""
    counts: Counter[str] = Counter()
    for name in ("broadcast", "all_gather", "all_reduce"):
        collective = getattr(distributed_c10d, name)

        def count(*arguments: Any, name: str = name, collective: Any = collective, **options: Any) -> Any:
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            counts[name] += 1
            counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
            return collective(*arguments, **options)

        monkeypatch.setattr(distributed_c10d, name, count)
    return counts


def test_a_start_and_a_restore_take_six_small_collectives_at_any_number_of_ranks(
    world_size: int, sent: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    service = Service()
    store = CountingStore(service)
    assert from_rank_0(lambda: begin_attempt([store], many_ranks.RUN)) == 1
    assert sent["broadcast"] == 2  # the size of the pickled value, then the value
    many_ranks.save(service, tmp_path, small.state_at(10, world_size=world_size))
    assert sent["broadcast"] == 2 and sent["all_gather"] == 0  # a save needs no collective
    values = small.empty()
    fragments = small.share(values, 0, world_size)
    found, notes = load_newest([store], fragments, small.state_at(0, world_size=world_size))
    assert found is not None and found.step == 10 and notes == []
    # The list of checkpoints from rank 0, then what each rank has found: sizes and values.
    assert {name: count for name, count in sent.items() if name != "bytes"} == {"broadcast": 4, "all_gather": 2}
    assert sent["bytes"] < 1000
