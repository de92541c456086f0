"""Check that a rank joins the process group with its own GPU selected, and waits for ranks of a slow node."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from electra_dist.config import ClusterConfig
from electra_dist.engine import process_group
from electra_dist.engine.rank_environment import PREFLIGHT_LIMIT_S


def test_the_gpu_of_a_rank_is_current_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would otherwise run the first collective of all ranks of a node on GPU 0."""
    calls: list[tuple] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(process_group.deepspeed, "init_distributed", lambda **_: calls.append(("join",)))
    process_group.init_distributed()
    assert calls == [("set_device", 3), ("join",)]


def test_ranks_wait_for_a_node_whose_checks_take_as_long_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of that node are started only after its checks, and must then import torch and DeepSpeed."""
    joined: list[dict] = []
    monkeypatch.setattr(process_group.deepspeed, "init_distributed", lambda **options: joined.append(options))
    process_group.init_distributed()
    (options,) = joined
    timeout_s = options["timeout"].total_seconds()
    assert timeout_s >= PREFLIGHT_LIMIT_S + 300
    assert timeout_s < ClusterConfig().hang_setup_s  # otherwise a rank that waits would count as hung


@pytest.mark.parametrize("visible", ["GPU-8f6d1c2a", "MIG-8f6d1c2a", "3"])
def test_deepspeed_learns_the_free_memory_of_a_gpu_of_any_name(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 1 and 2 ask for it; DeepSpeed's own way reads the names in CUDA_VISIBLE_DEVICES as numbers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 << 30, 80 << 30))
    monkeypatch.setattr(process_group.deepspeed, "init_distributed", lambda **_: None)
    accelerator = CUDA_Accelerator()
    monkeypatch.setattr(process_group, "get_accelerator", lambda: accelerator)
    process_group.init_distributed()
    assert accelerator.available_memory() == 7 << 30
