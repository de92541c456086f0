"""Check the deletion of many objects: one request to S3 for 1,000 keys, or one for each key if S3 does not know that.

Some S3 services do not have the operation that deletes several objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from electra_dist.errors import StoreError
from electra_dist.store.interface import Store
from electra_dist.store.s3 import s3_store
from electra_dist.store.s3.requests import S3Requests
from electra_dist.store.s3.s3_store import S3Store


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Name of an S3 operation, such as "delete_object" -> how many requests S3 stores have sent during the test."""
    counts: Counter[str] = Counter()
    send = S3Requests.send

    def count(self: S3Requests, operation: str, *arguments: Any) -> Any:
        """Count a request, and send it."""
        counts[operation] += 1
        return send(self, operation, *arguments)

    monkeypatch.setattr(S3Requests, "send", count)
    return counts


def write_some(store: Store, num: int) -> list[str]:
    """Write `num` small objects, and return their keys, which have characters that XML and URLs must escape."""
    keys = [f"a & b/<{number}> %41.json" for number in range(num)]
    for key in keys:
        store.write(key, b"x")
    return keys


def test_exactly_the_named_objects_are_deleted(store: Store) -> None:
    keys = write_some(store, 12)
    store.delete_all([*keys[:5], *keys[6:], "no such object"])
    assert store.list() == [keys[5]]
    store.delete_all([])
    store.delete_all(keys[5:6])
    assert store.list() == []


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_each_request_deletes_as_many_objects_as_it_may(
    store: Store, sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    delete_batch = S3Store._delete_batch

    def note(self: S3Store, keys: Sequence[str]) -> set[str]:
        """Record the number of keys of a request, and send it."""
        batches.append(len(keys))
        return delete_batch(self, keys)

    assert s3_store._MOST_DELETED == 1000
    monkeypatch.setattr(s3_store, "_MOST_DELETED", 10)
    monkeypatch.setattr(S3Store, "_delete_batch", note)
    keys = write_some(store, 3)
    store.delete_all([*(f"missing-{number}" for number in range(25)), *keys])
    assert store.list() == []
    assert batches == [10, 10, 8]
    assert sent["delete_object"] == 0


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_service_that_cannot_delete_several_objects_deletes_one_after_another(
    store: Store, sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = S3Requests.call

    def refuse(self: S3Requests, key: str, operation: str, *arguments: Any, **options: Any) -> Any:
        """Refuse the request that deletes several objects, and send all others."""
        if operation == "delete_objects":
            raise StoreError("the service does not have this operation")
        return call(self, key, operation, *arguments, **options)

    monkeypatch.setattr(S3Requests, "call", refuse)
    store.delete_all(write_some(store, 20))
    assert store.list() == []
    assert sent["delete_object"] == 20


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_key_that_the_answer_does_not_list_is_deleted_by_a_request_of_its_own(
    store: Store, sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = S3Requests.call

    def answer_for_another_key(self: S3Requests, key: str, operation: str, *arguments: Any, **options: Any) -> Any:
        """Answer a request that deletes several objects without sending it; the answer lists none of its keys."""
        if operation == "delete_objects":
            return {"Deleted": [{"Key": "of another"}]}
        return call(self, key, operation, *arguments)

    monkeypatch.setattr(S3Requests, "call", answer_for_another_key)
    keys = write_some(store, 3)
    store.delete_all(keys)
    monkeypatch.setattr(S3Requests, "call", call)
    assert store.list() == []
    assert sent["delete_object"] == 3
