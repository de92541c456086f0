"""A process group of one rank in this process, in which engines can be built one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from electra_dist.engine.engine import init_distributed


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """gloo with one rank; left in place for the session because DeepSpeed remembers it globally."""
    init_distributed()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
