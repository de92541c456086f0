"""S3 faults between the store and a real server: each kind alone, all kinds mixed, and errors that are final."""

from __future__ import annotations

import io
import itertools
import os
import re
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from support import s3_server
from support.fault_server import BODY_FAULTS, DOWNLOAD_FAULTS, FaultPlan, FaultProxy

from electra_dist.errors import StorageLost, StoreError, StoreMissing, UserError
from electra_dist.store.interface import RemoteStore, Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience

DATA = os.urandom(1 << 20)
IMPATIENT = Pace(tries=4, first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=0.5)


@pytest.mark.parametrize("fault", [kind for kind in DOWNLOAD_FAULTS if kind != "flip"])
def test_each_download_fault_is_survived(fault: str, faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, Pace(first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=0.5))
    store.write("x", DATA)
    # An even number: a replaced object costs two requests, the broken one and the one that is refused after it.
    plan.rate, plan.faults, plan.stall_s, plan.in_a_row = 1.0, (fault,), 1.0, 4
    assert store.read("x") == DATA
    assert plan.counts[fault] >= 3
    assert store.patience.retries >= 3
    assert store.patience.retry_wait_s > 0


@pytest.mark.parametrize("fault", [kind for kind in DOWNLOAD_FAULTS if kind != "flip"])
def test_each_download_fault_in_a_range_is_survived(fault: str, faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, Pace(first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=0.5))
    store.write("x", DATA)
    # An even number: a replaced object costs two requests, the broken one and the one that is refused after it.
    plan.rate, plan.faults, plan.stall_s, plan.in_a_row = 1.0, (fault,), 1.0, 4
    assert store.read_range("x", 100_001, 700_000) == DATA[100_001:800_001]
    assert plan.counts[fault] >= 3


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_mixed_faults_of_uploads_and_downloads_are_survived_and_counted(
    seed: int, faulty: Callable[..., Store], tmp_path: Path
) -> None:
    """Half of all requests fail."""
    kinds = tuple(kind for kind in (*DOWNLOAD_FAULTS, "lost") if kind not in ("flip", "stall"))
    plan = FaultPlan(seed=seed, rate=0.5, faults=kinds)
    store = faulty(plan)
    for number in range(8):
        data = DATA[number * 1000 :]
        store.write(f"k{number}", data)
        assert store.read(f"k{number}") == data
        store.fetch(f"k{number}", tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == data
    assert plan.counts.total() >= 10
    # A replaced object may cost two retries: one for the broken body, one for the refused range of the old version.
    assert plan.counts.total() <= store.patience.retries <= plan.counts.total() + plan.counts["replaced"]


def test_an_interrupted_download_resumes_where_it_stopped(faulty: Callable[..., Store], proxy: FaultProxy) -> None:
    """The body of 1 MiB ends early up to eight times in a row."""
    plan = FaultPlan(rate=0.0)
    store = faulty(plan)
    store.write("x", DATA)
    plan.rate, plan.faults, plan.in_a_row = 1.0, ("short",), 8
    sent = []
    forward = proxy.RequestHandlerClass._forward  # type: ignore[attr-defined]

    def watch(handler: object, body: bytes) -> object:
        sent.append(handler.headers.get("Range"))  # type: ignore[attr-defined]
        return forward(handler, body)

    proxy.RequestHandlerClass._forward = watch  # type: ignore[attr-defined]
    try:
        assert store.read("x") == DATA
    finally:
        proxy.RequestHandlerClass._forward = forward  # type: ignore[attr-defined]
    starts = [int(text[len("bytes=") : -1]) for text in sent if text]
    assert sent[0] == "bytes=0-"
    assert starts == sorted(starts)
    assert starts[-1] > len(DATA) // 2


def test_an_object_replaced_during_its_download_is_read_in_its_new_version(
    faulty: Callable[..., Store], proxy: FaultProxy
) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan)
    new = os.urandom(len(DATA))
    store.write("x", DATA)
    plan.rate, plan.faults, plan.in_a_row = 1.0, ("short",), 1
    draw = plan.draw

    def replace_then_draw(method: str, path: str) -> tuple[str | None, float]:
        drawn = draw(method, path)
        if drawn[0] is None and method == "GET":
            plan.rate = 0.0
            open_store(store.url, f"http://{proxy.upstream.netloc}").write("x", new)
        return drawn

    plan.draw = replace_then_draw  # type: ignore[method-assign]
    assert store.read("x") == new
    assert plan.counts["short"] == 1


def test_write_new_knows_whether_it_won_although_answers_are_lost(faulty: Callable[..., Store]) -> None:
    """The answer is lost after the object was stored."""
    plan = FaultPlan(rate=0.0)
    store = faulty(plan)
    plan.rate, plan.faults, plan.in_a_row = 1.0, ("lost",), 2
    assert store.write_new("commit", b"mine")
    assert plan.counts["lost"] == 2
    assert not store.write_new("commit", b"mine")
    assert store.read("commit") == b"mine"


def test_exactly_one_of_eight_concurrent_write_new_calls_wins_behind_faults(faulty: Callable[..., Store]) -> None:
    store = faulty(FaultPlan(seed=5, rate=0.4, faults=("lost", "slowdown", "reset")))
    for number in range(10):
        won: list[int] = []

        def race(racer: int, key: str = f"commit-{number}", won: list[int] = won) -> None:
            if store.write_new(key, b"%d" % racer):
                won.append(racer)

        threads = [threading.Thread(target=race, args=(racer,)) for racer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.read(f"commit-{number}") == b"%d" % won[0]


def test_multipart_upload_survives_faults(
    faulty: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from electra_dist.store.s3 import s3_store

    monkeypatch.setattr(s3_store, "_MULTIPART_FROM", 1 << 20)
    monkeypatch.setattr(s3_store, "PART_BYTES", 5 << 20)  # the smallest part that S3 allows
    path = tmp_path / "big"
    path.write_bytes(os.urandom(12 << 20))
    for kinds in (("slowdown", "reset"), ("lost",)):
        plan = FaultPlan(rate=1.0, faults=kinds, in_a_row=2)
        store = faulty(plan)
        store.upload(path, f"big-{kinds[0]}")
        assert plan.counts.total() >= 4
        plan.rate = 0.0
        assert store.read(f"big-{kinds[0]}") == path.read_bytes()


@pytest.mark.parametrize("fault", ["slowdown", "reset", "stall", "missing", "expired", "replaced"])
def test_a_fault_that_persists_fails_naming_the_object_and_the_next_step(
    fault: str, faulty: Callable[..., Store]
) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, IMPATIENT)
    store.write("shard.tar", DATA[:1000])  # smaller than a chunk: a broken body makes no progress
    plan.rate, plan.faults, plan.in_a_row, plan.stall_s = 1.0, (fault,), 10**9, 1.0
    with pytest.raises(StorageLost, match=r"/prefix/shard.tar at 127.0.0.1:\d+: .*; storage was waited for \d s") as e:
        store.read("shard.tar")
    assert "\n" not in str(e.value)
    assert re.search("check the object|restore the object|renew them", str(e.value))


def test_retries_end_when_the_patience_is_over(faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=1.0, faults=("slowdown",), in_a_row=10**9)
    store = faulty(plan, Pace(first_pause_s=0.01, longest_pause_s=0.01))
    store.patience.limit_s = 0.3
    with pytest.raises(StorageLost, match=r"503 SlowDown.*storage was waited for 0 s") as lost:
        store.read("x")
    assert lost.value.patience is store.patience
    assert store.patience.retries >= 3


def test_final_errors_fail_without_retry_naming_the_next_step_and_no_secret(
    s3: s3_server.S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Pace(first_pause_s=60.0)
    endpoint = s3.endpoint_url

    def failure(url: str, call: str = "read") -> str:
        store = open_store(url, endpoint, Patience(60.0, pace=patient))
        arguments = {
            "read": ("k",),
            "write": ("k", b""),
            "exists": ("k",),
            "size": ("k",),
            "list": (),
            "write_new": ("k", b""),
        }
        with pytest.raises(StoreError) as caught:
            getattr(store, call)(*arguments[call])
        text = "".join(traceback.format_exception(caught.value))
        assert s3_server.SECRET_KEY not in text
        assert s3_server.ACCESS_KEY not in text
        assert store.patience.retries == 0
        return str(caught.value)

    for call in ("read", "write", "exists", "list", "write_new"):
        assert re.match(
            r"s3://nowhere/a.*: no such bucket; create bucket nowhere or correct", failure("s3://nowhere/a", call)
        )
    assert "no such object" in failure(f"{bucket}/a", "size")
    if s3_server.best_kind() == "radosgw":  # moto accepts any key and secret
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert "credentials not accepted (SignatureDoesNotMatch); correct AWS_*" in failure(f"{bucket}/a", "size")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
        assert "credentials not accepted (InvalidAccessKeyId); correct AWS_*" in failure(f"{bucket}/a", "size")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no credentials; set AWS_ACCESS_KEY_ID" in failure(f"{bucket}/a", "size")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "access refused; give these credentials the right"),
        (403, "SignatureDoesNotMatch", r"credentials not accepted \(SignatureDoesNotMatch\)"),
        (403, "InvalidAccessKeyId", r"credentials not accepted \(InvalidAccessKeyId\)"),
        (403, "RequestTimeTooSkewed", "clock is wrong"),
        (400, "IllegalLocationConstraintException", "another region; set AWS_REGION"),
        (501, "NotImplemented", "lacks an operation"),
        (400, "InvalidArgument", "refused with 400 InvalidArgument"),
    ],
)
def test_final_answers_are_explained_without_retry_and_without_the_services_text(
    status: int, code: str, message: str, faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of the service quotes the secret key, as real services do, so it must not be repeated."""
    from support import fault_server

    monkeypatch.setitem(
        fault_server.ANSWERS, "slowdown", (status, code, f"{s3_server.ACCESS_KEY} {s3_server.SECRET_KEY}")
    )
    store = faulty(FaultPlan(rate=1.0, faults=("slowdown",), in_a_row=10**9))
    with pytest.raises(StoreError, match=message) as caught:
        store.read("x")
    assert s3_server.ACCESS_KEY not in "".join(traceback.format_exception(caught.value))
    assert store.patience.retries == 0


def test_a_missing_object_is_asked_for_again_unless_it_may_be_missing(faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan)
    store.write("x", b"1")
    plan.rate, plan.faults = 1.0, ("missing",)
    assert store.read_or_none("x") is None
    assert store.patience.retries == 0
    assert store.read("x") == b"1"


@pytest.mark.parametrize("limit_s", [0.0, 0.05])
def test_a_missing_object_is_missing_when_the_patience_is_over(limit_s: float, faulty: Callable[..., Store]) -> None:
    store = faulty(FaultPlan(rate=0.0), Pace(first_pause_s=10.0))
    store.write("there", b"")
    store.patience.limit_s = limit_s
    for read in (lambda: store.read("x"), lambda: store.read_range("x", 0, 1)):
        with pytest.raises(StoreMissing, match=r"/prefix/x at 127.0.0.1:\d+: no such object; restore the object or"):
            read()


def test_an_object_does_not_count_as_missing_after_another_fault_or_before_the_patience_is_over(
    faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, Pace(first_pause_s=10.0))
    store.write("x", b"1")
    plan.rate, plan.faults, plan.in_a_row = 1.0, ("missing",), 10**9
    with store.patience.at_most(0.05), pytest.raises(StorageLost, match="no such object"):
        store.read("x")
    store.patience.limit_s = 0.05
    faults = itertools.chain(["slowdown"], itertools.repeat("missing"))
    monkeypatch.setattr(plan, "draw", lambda method, path: (next(faults), 0.0))
    with pytest.raises(StorageLost, match="SlowDown"):
        store.read("x")


def test_credentials_are_read_again_when_they_expire(
    faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    from electra_dist.store.s3 import requests

    made = itertools.count()
    make = requests.make_client
    monkeypatch.setattr(requests, "make_client", lambda *a: (next(made), make(*a))[1])
    plan = FaultPlan(rate=0.0)
    store = faulty(plan)
    store.write("x", b"1")
    plan.rate, plan.faults, plan.in_a_row = 1.0, ("expired",), 2
    assert store.read("x") == b"1"
    assert next(made) == 3


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@bucket/x", "s3://KEY@bucket"])
def test_credentials_in_urls_are_refused_and_not_printed(url: str) -> None:
    with pytest.raises(UserError, match="keep credentials out of URLs") as caught:
        open_store(url)
    assert "KEY" not in str(caught.value)
    for endpoint in ("http://user:SECRET@host:9000", "https://host/?X-Amz-Signature=SECRET"):
        with pytest.raises(UserError, match="keep credentials") as caught:
            open_store("s3://bucket/x", endpoint)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(UserError, match="not an http"):
        open_store("s3://bucket/x", "host:9000")


def test_unreachable_service_fails_naming_its_address(bucket: str) -> None:
    quick = Pace(first_pause_s=0.001, longest_pause_s=0.01, tries=30)
    store = open_store(f"{bucket}/x", "http://127.0.0.1:9", Patience(60.0, pace=quick))
    with pytest.raises(StorageLost, match=r"127.0.0.1:9: .*check the endpoint URL and the network; storage was"):
        store.read("x")


def test_full_disk_is_not_mistaken_for_a_network_fault(faulty: Callable[..., Store]) -> None:
    class FullDisk(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    store = faulty(FaultPlan(rate=0.0))
    store.write("x", DATA)
    assert isinstance(store, RemoteStore)
    with pytest.raises(OSError, match="No space left"):
        store.download("x", FullDisk(), must_exist=False)
    assert store.patience.retries == 0


def test_the_schedule_of_faults_is_a_function_of_its_seed() -> None:
    def draws(seed: int) -> list[tuple[str | None, float]]:
        plan = FaultPlan(seed=seed)
        return [plan.draw("GET", f"/bucket/{n % 7}") for n in range(200)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert set(BODY_FAULTS) < {kind for kind, _ in draws(1)}


def test_kinds_of_faults_only_hit_the_paths_that_they_apply_to() -> None:
    """`flip:.tar` only flips shards, and the listing of a bucket is never flipped or missing."""
    plan = FaultPlan(seed=1, rate=1.0, faults=("flip:.tar", "missing", "slowdown"), in_a_row=10**9)

    def kinds(path: str) -> set[str | None]:
        return {plan.draw("GET", path)[0] for _ in range(50)}

    assert kinds("/bucket/a.tar") == {"flip", "missing", "slowdown"}
    assert kinds("/bucket/corpus.json") == {"missing", "slowdown"}
    assert kinds("/bucket") == kinds("/bucket/") == {"slowdown"}
