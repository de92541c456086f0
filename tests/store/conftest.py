"""An S3 server for the session, a bucket for each test, and the fault proxy between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import s3_server
from support.fault_server import FaultPlan, FaultProxy, running_faults

from electra_dist.store.interface import Store
from electra_dist.store.open import open_store
from electra_dist.store.retry import RetryPolicy

QUICK = RetryPolicy(first_wait_s=0.001, max_wait_s=0.01, read_timeout_s=1.0)


@pytest.fixture(scope="session")
def s3() -> Iterator[s3_server.S3Server]:
    with s3_server.running_s3() as server:
        yield server


@pytest.fixture
def bucket(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """URL of a new bucket, with its credentials in the environment."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    # Named after the test, so that a schedule of faults, which depends on paths, is the same in any order of tests.
    return s3_server.make_bucket(*s3, f"test-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}")


@pytest.fixture
def proxy(s3: s3_server.S3Server) -> Iterator[FaultProxy]:
    """The fault proxy, still without faults: give it a `plan`."""
    with running_faults(s3.endpoint_url, FaultPlan(rate=0.0)) as running:
        yield running


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    url = request.getfixturevalue("bucket")
    return open_store(f"{url}/some/prefix", request.getfixturevalue("s3").endpoint_url, retry=QUICK)


@pytest.fixture
def faulty(bucket: str, proxy: FaultProxy) -> Callable[..., Store]:
    """`faulty(plan)`: a store whose requests go through the proxy."""

    def connect(plan: FaultPlan, retry: RetryPolicy = QUICK) -> Store:
        proxy.plan = plan
        return open_store(f"{bucket}/prefix", proxy.endpoint_url, retry=retry)

    return connect
