"""A store on Azure Blob Storage whose service fails: faults are waited out, and no object is written twice or mixed.

The other tests of this folder that take the fixture `store` hold it to the contract of every store.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator

import pytest
from support.fault_server import FaultPlan, FaultProxy, running_faults
from support.s3_server import S3Server

from electra_dist.errors import StorageLost, StoreError, UserError
from electra_dist.store import cloud_store
from electra_dist.store.cloud_store import CloudStore
from electra_dist.store.failure_kinds import FailureKind
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience

QUICK = Pace(first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=1.0)


@pytest.fixture
def azure_proxy(azurite: S3Server) -> Iterator[FaultProxy]:
    """A fault proxy in front of the emulator that injects nothing until a test sets its `plan`."""
    with running_faults(azurite.endpoint_url.removesuffix("/devstoreaccount1"), FaultPlan(rate=0.0)) as running:
        yield running


@pytest.fixture
def faulty_azure(azure_proxy: FaultProxy, container: str) -> Callable[[FaultPlan], Store]:
    """A function that opens a store behind the fault proxy."""

    def connect(plan: FaultPlan) -> Store:
        azure_proxy.plan = plan
        url = f"{azure_proxy.endpoint_url}/devstoreaccount1"
        return open_store(f"{container}/prefix", url, Patience(60.0, pace=QUICK))

    return connect


@pytest.mark.parametrize("kind", ["slowdown", "reset", "short", "missing"])
def test_what_is_written_and_read_through_faults_is_right(
    faulty_azure: Callable[[FaultPlan], Store], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_store, "PART_BYTES", 1 << 16)
    store = faulty_azure(FaultPlan(seed=1, rate=0.5, faults=(kind,), in_a_row=3))
    contents = {f"object-{number}": os.urandom(70_000 * number) for number in range(6)}
    for key, data in contents.items():
        store.write(key, data)
    for key, data in contents.items():
        assert store.read(key) == data
        assert store.read_range(key, 1000, 50_000) == data[1000:51_000]
    assert store.list() == sorted(contents)
    assert store.patience.retries > 0


def test_a_creation_whose_answer_is_lost_is_known_by_its_tag(faulty_azure: Callable[[FaultPlan], Store]) -> None:
    store = faulty_azure(FaultPlan(seed=1, rate=1.0, faults=("lost",), in_a_row=1))
    assert store.write_new("lock", b"mine")
    assert store.patience.retries > 0
    assert not store.write_new("lock", b"theirs")
    assert store.read("lock") == b"mine"


def test_an_object_that_is_replaced_during_a_download_is_read_anew(
    container: str, azurite: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    monkeypatch.setattr(cloud_store, "PART_BYTES", 1000)
    store = open_store(f"{container}/x", azurite.endpoint_url, Patience(60.0, pace=QUICK))
    store.write("object", b"old" * 1000)
    get = obstore.get
    asked = []

    def get_and_replace(*arguments: object, **options: object) -> object:
        answer = get(*arguments, **options)  # type: ignore[arg-type, call-overload]
        asked.append(options)
        if len(asked) == 2:
            store.write("object", b"NEW" * 1100)
        return answer

    monkeypatch.setattr(obstore, "get", get_and_replace)
    assert store.read("object") == b"NEW" * 1100
    assert store.patience.retries == 1


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("status code: 403 <Code>AuthenticationFailed</Code>", FailureKind.USER, "not accepted"),
        ("status code: 404 <Code>ContainerNotFound</Code>", FailureKind.USER, "no such container"),
        ("status code: 403 <Code>AuthorizationPermissionMismatch</Code>", FailureKind.USER, "access refused"),
        ("status code: 503 <Code>ServerBusy</Code>", FailureKind.TRANSIENT, "503 ServerBusy"),
        ("status code: 500 <Code>OperationTimedOut</Code>", FailureKind.TRANSIENT, "500 OperationTimedOut"),
        ("status code: 403 <Code>AccountQuotaExceeded</Code>", FailureKind.AWAY, "over its quota"),
        ("status code: 429 <Code>rateLimitExceeded</Code>", FailureKind.TRANSIENT, "429 rateLimitExceeded"),
        ("status code: 409 <Code>BlobArchived</Code>", FailureKind.USER, "cold storage"),
        ("HTTP error: error sending request", FailureKind.AWAY, "cannot be reached"),
        ("error decoding response body", FailureKind.TRANSIENT, "broken connection"),
    ],
)
def test_errors_mean_a_try_a_wait_or_a_mistake(text: str, kind: FailureKind, reason: str) -> None:
    failure = cloud_store._failure(Exception(text))
    assert failure.kind is kind
    assert reason in failure.reason


def test_mistakes_are_named_in_one_line_without_what_the_service_said(
    container: str, azurite: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(url: str, endpoint: str | None = azurite.endpoint_url) -> str:
        with pytest.raises(UserError) as error:
            open_store(url, endpoint, Patience(0.0)).read("key")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message("az://nothing-here/x").startswith("az://nothing-here/x/key: no such container or bucket; create it")
    with monkeypatch.context() as changed:
        changed.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA" + azurite.env["AZURE_STORAGE_ACCOUNT_KEY"][4:])
        assert "credentials that are not accepted; set AZURE_STORAGE_ACCOUNT_NAME" in message(container)
    with pytest.raises(StorageLost, match="the service cannot be reached; check the endpoint URL"):
        open_store(container, "http://127.0.0.1:1/devstoreaccount1", Patience(0.0)).read("key")


def test_a_store_travels_to_another_process_but_not_into_a_fork(
    container: str, azurite: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(container, azurite.endpoint_url)
    store.write("key", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert isinstance(copy, CloudStore) and copy.read("key") == b"1"
    monkeypatch.setattr(CloudStore, "_process", os.getpid() - 1)
    with pytest.raises(StoreError, match="was forked from one that has used such a URL"):
        store.read("key")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UserError, match=r"az://container/x needs packages that are not installed; run: pip"):
        open_store("az://container/x", None, Patience(0.0)).write("key", b"1")
