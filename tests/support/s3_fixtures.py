"""S3 fixtures: a server for the session, a bucket for each test, and a fault proxy in front of the server.

A conftest imports the fixtures that it needs by name. The bucket lies on the server of the fixture named `s3`: import
`s3` for radosgw where it is installed, or `moto as s3` where moto is enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fault_server import FaultPlan, FaultProxy, running_faults
from support.s3_server import S3Server, best_kind, make_bucket, running_s3, shared_moto

from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server: radosgw where it is installed, otherwise moto."""
    if best_kind() == "moto":
        yield shared_moto()
        return
    with running_s3("radosgw") as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> S3Server:
    """Moto's server, one for all workers of this call."""
    return shared_moto()


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL of a new bucket for this test; its credentials are in the environment."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    # The name is derived from the test: no other test uses it, and it is the same in every session and order of tests.
    return make_bucket(*s3, f"test-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}")


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """A fault proxy that injects nothing until a test sets its `plan`."""
    with running_faults(s3.endpoint_url, FaultPlan(rate=0.0)) as running:
        yield running


@pytest.fixture
def open_s3(s3: S3Server, bucket: str) -> Callable[[str], Store]:
    """A function that opens a store below this test's bucket: `open_s3("prefix")`."""
    return lambda prefix: open_store(f"{bucket}/{prefix}", s3.endpoint_url)


@pytest.fixture
def two_targets(tmp_path: Path, open_s3: Callable[[str], Store]) -> list[Store]:
    """Two checkpoint targets: a local folder, then S3."""
    return [open_store(str(tmp_path / "local")), open_s3("far")]
