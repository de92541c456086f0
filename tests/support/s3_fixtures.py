"""Fixtures of S3: a server for the session, a bucket for each test, and the fault proxy between.

A conftest imports the ones that it needs by name. What a bucket's server is, the name `s3` decides: import `s3` for
the best server there is, or `moto as s3` where a test needs no more than moto.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fault_server import FaultPlan, FaultProxy, running_faults
from support.s3_server import S3Server, make_bucket, running_s3

from electra_dist.store.interface import Store
from electra_dist.store.open import open_store


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """The best S3 server there is."""
    with running_s3() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """Moto's server, which is there in a second."""
    with running_s3("moto") as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """URL of a bucket of this test's own, with its credentials in the environment."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    # Named after the test: its own, and the same in every session and in any order of tests, so that faults repeat.
    return make_bucket(*s3, f"test-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}")


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """The fault proxy, still without faults: give it a `plan`."""
    with running_faults(s3.endpoint_url, FaultPlan(rate=0.0)) as running:
        yield running


@pytest.fixture
def open_s3(s3: S3Server, bucket: str) -> Callable[[str], Store]:
    """`open_s3("a")`: a store below this test's bucket."""
    return lambda prefix: open_store(f"{bucket}/{prefix}", s3.endpoint_url)


@pytest.fixture
def two_targets(tmp_path: Path, open_s3: Callable[[str], Store]) -> list[Store]:
    """A local folder, then S3."""
    return [open_store(str(tmp_path / "local")), open_s3("far")]
