"""Check that the forward times of 1,024 ranks reach the host with one collective and one copy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from electra_dist.train.monitor import RankMonitor
from electra_dist.train.step_operators import OperatorCounter

NUM_RANKS = 1024


def test_the_host_reads_the_times_of_all_ranks_once_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective is replaced by a function that returns, for rank r, the time of this rank plus r seconds."""
    calls = []

    def gather_into(output: torch.Tensor, own_time: torch.Tensor) -> None:
        """Fill `output` with the times of 1,024 ranks, without other processes."""
        calls.append(own_time.shape)
        output.copy_(torch.arange(NUM_RANKS) + own_time)

    monkeypatch.setattr(dist, "get_world_size", lambda: NUM_RANKS)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather_into)
    with OperatorCounter() as counter:
        times = RankMonitor._gather(0.25)
    assert times == [rank + 0.25 for rank in range(NUM_RANKS)]
    assert calls == [(1,)]
    assert counter.num_host_reads == 1
