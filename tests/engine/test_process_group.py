"""Joining the process group: each rank works on its own GPU before the first collective."""

from __future__ import annotations

import pytest
import torch

from electra_dist.engine import process_group


def test_the_gpu_of_a_rank_is_current_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would otherwise run the first collective of all ranks of a node on GPU 0."""
    calls: list[tuple] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(process_group.deepspeed, "init_distributed", lambda **_: calls.append(("join",)))
    process_group.init_distributed()
    assert calls == [("set_device", 3), ("join",)]
