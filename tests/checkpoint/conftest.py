"""Fixtures: a process group of one rank in this process, local and S3 targets, and a committed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support import checkpoints as small
from support.checkpoints import folder_name
from support.s3_fixtures import bucket, open_s3, two_targets
from support.s3_fixtures import moto as s3

from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

__all__ = ["bucket", "one_rank", "open_s3", "s3", "saved", "target", "two_targets"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A gloo group of one rank, or the group that an earlier test of the session has not destroyed."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty checkpoint target: a local folder or S3."""
    if request.param == "local":
        return open_store(str(tmp_path / "target"))
    return request.getfixturevalue("open_s3")("target")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a committed checkpoint of step 7."""
    folder = tmp_path_factory.mktemp("format")
    small.save([open_store(str(folder))], 7)
    return folder / folder_name(7, 1)
