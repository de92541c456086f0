"""Fixtures: a store of each kind, and stores behind the fault proxy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fault_server import FaultPlan, FaultProxy
from support.s3_fixtures import bucket, proxy, s3

from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience

__all__ = ["bucket", "faulty", "proxy", "s3", "store"]

QUICK = Pace(first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=1.0)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store: a local folder or S3."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    url = request.getfixturevalue("bucket")
    return open_store(f"{url}/some/prefix", request.getfixturevalue("s3").endpoint_url, Patience(60.0, pace=QUICK))


@pytest.fixture
def faulty(bucket: str, proxy: FaultProxy) -> Callable[..., Store]:
    """A function that opens a store behind the fault proxy: `faulty(plan)`."""

    def connect(plan: FaultPlan, pace: Pace = QUICK) -> Store:
        proxy.plan = plan
        return open_store(f"{bucket}/prefix", proxy.endpoint_url, Patience(60.0, pace=pace))

    return connect
