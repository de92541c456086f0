"""A process group of one rank in this process; local and S3 targets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support import s3_server

from electra_dist.store.interface import Store
from electra_dist.store.open import open_store


@pytest.fixture
def one_rank() -> Iterator[None]:
    """gloo with one rank, unless another test of the session left one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def s3() -> Iterator[s3_server.S3Server]:
    with s3_server.running_s3("moto") as server:
        yield server


@pytest.fixture
def open_s3(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Store]:
    """`open_s3("a")`: a store below a bucket of this test's own, with its credentials in the environment."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    digest = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    bucket = s3_server.make_bucket(*s3, f"test-{digest}")
    return lambda prefix: open_store(f"{bucket}/{prefix}", s3.endpoint_url)


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty target of each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "target"))
    return request.getfixturevalue("open_s3")("target")


@pytest.fixture
def two_targets(tmp_path: Path, open_s3: Callable[[str], Store]) -> list[Store]:
    """A local folder, then S3."""
    return [open_store(str(tmp_path / "local")), open_s3("far")]
