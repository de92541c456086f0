"""Fixtures: a store of each kind, and stores behind the fault proxy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.azurite import azurite, container
from support.fault_server import FaultPlan, FaultProxy
from support.google_storage import google, google_bucket
from support.s3_fixtures import bucket, moto, proxy, s3

from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience

__all__ = ["azurite", "bucket", "container", "faulty", "google", "google_bucket", "moto", "proxy", "s3", "store"]

QUICK = Pace(first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=1.0)


REMOTE = {"s3": ("bucket", "s3"), "azure": ("container", "azurite"), "google": ("google_bucket", "google")}


@pytest.fixture(params=["local", *REMOTE])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store: a local folder, S3, Azure Blob Storage or Google Cloud Storage."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    url, server = REMOTE[request.param]
    prefix = f"{request.getfixturevalue(url)}/some/prefix"
    return open_store(prefix, request.getfixturevalue(server).endpoint_url, Patience(60.0, pace=QUICK))


@pytest.fixture
def faulty(bucket: str, proxy: FaultProxy) -> Callable[..., Store]:
    """A function that opens a store behind the fault proxy: `faulty(plan)`."""

    def connect(plan: FaultPlan, pace: Pace = QUICK) -> Store:
        proxy.plan = plan
        return open_store(f"{bucket}/prefix", proxy.endpoint_url, Patience(60.0, pace=pace))

    return connect
