"""A training process turns torch's deterministic mode on before it joins the others, and keeps it while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from electra_dist.config.load import load_config
from electra_dist.train import run


@pytest.mark.parametrize("setting", [{}, {"engine.deterministic": False}], ids=["default", "switched off"])
def test_a_run_on_a_gpu_trains_in_the_deterministic_mode_unless_it_is_switched_off(
    setting: dict[str, bool], tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mode torch adds gradients of embeddings in any order on a GPU. This machine pretends to have one."""
    seen: list[bool] = []

    def train(*_: object) -> bool:
        """Stand for all that follows once the ranks have joined; say that the run is asked to stop."""
        seen.append(torch.are_deterministic_algorithms_enabled())
        return True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "set by the test")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(run, "check_inputs", lambda config, *_, **__: SimpleNamespace(config=config, notes=[]))
    monkeypatch.setattr(run, "check_machine", lambda config: None)
    monkeypatch.setattr(run, "init_distributed", lambda: None)
    monkeypatch.setattr(run.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(run, "StopRequest", lambda *_, **__: None)
    monkeypatch.setattr(run, "_pause_after_lost_storage", train)
    try:
        run.run(load_config(tiny_config("run", **setting), []))
    finally:
        torch.use_deterministic_algorithms(False)

    assert seen == [not setting]
