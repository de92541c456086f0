"""Ways in which S3 fails without an error: endless, slow or wrong answers, late credentials, no name, no certificate.

Each operation ends, the answer is right or the error is one line, and a fault that passes is survived.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import s3_server
from support.certificates import serve_https
from support.fault_server import FaultPlan, FaultProxy
from support.wrong_answers import LISTING_FAULTS

from electra_dist.errors import StorageLost, StoreAway, StoreError
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience
from electra_dist.store.s3 import answers, requests, s3_store

DATA = os.urandom(300_000)
FOREVER = 10**9
IMPATIENT = Pace(tries=3, first_pause_s=0.001, longest_pause_s=0.01)
PATIENT = Pace(first_pause_s=0.001, longest_pause_s=0.2)
HURRIED = Pace(tries=3, first_pause_s=0.001, longest_pause_s=0.01, rate_window_s=1.0)  # 1 s in place of 60 s


def ends(operation: Callable[[], Any], within_s: float = 30.0) -> Any:
    """Return the result of `operation` or raise its error; fail if it has not ended within `within_s` seconds."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(operation())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            outcome.append(error)

    threading.Thread(target=run, daemon=True).start()
    deadline = time.monotonic() + within_s
    while not outcome:
        assert time.monotonic() < deadline, "the operation does not end"
        time.sleep(0.01)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def fails(operation: Callable[[], Any]) -> str:
    """Return the message of the StorageLost that `operation` ends with; it is one line without a secret."""
    with pytest.raises(StorageLost) as caught:
        ends(operation)
    message = str(caught.value)
    assert "\n" not in message and "SECRET" not in message
    return message


@pytest.mark.parametrize(
    "fault",
    ["redirected", "balancer", "page", "noetag", "nolength", "errordoc", "cut", "away"],
)
def test_a_wrong_answer_is_asked_for_again_and_never_believed(
    fault: str, faulty: Callable[..., Store], tmp_path: Path
) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, PATIENT)
    store.write("x", DATA)
    plan.rate, plan.faults, plan.in_a_row = 1.0, (fault,), 2
    assert ends(lambda: store.read("x")) == DATA
    assert ends(lambda: store.read_range("x", 1000, 5000)) == DATA[1000:6000]
    assert ends(lambda: store.exists("x"))
    assert ends(lambda: store.size("x")) == len(DATA)
    assert ends(lambda: store.list()) == ["x"]
    ends(lambda: store.write("y", b"written"))
    assert ends(lambda: store.write_new("z", b"new"))
    plan.rate = 0.0
    assert store.read("y") == b"written"
    assert store.read("z") == b"new"
    assert plan.counts[fault] >= 2


@pytest.mark.parametrize("fault", ["redirected", "balancer", "page", "noetag", "errordoc", "away"])
def test_a_wrong_answer_that_persists_ends_with_one_line(fault: str, faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, IMPATIENT)
    store.write("x", DATA)
    plan.rate, plan.faults, plan.in_a_row = 1.0, (fault,), FOREVER
    message = fails(lambda: store.read("x"))
    assert re.search(r"/prefix/x at 127.0.0.1:\d+: .*; check .*; storage was waited", message)


@pytest.mark.parametrize("fault", LISTING_FAULTS)
def test_a_listing_without_an_end_ends(fault: str, faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, IMPATIENT)
    for key in ("a", "b"):
        store.write(key, b"")
    plan.rate, plan.faults, plan.in_a_row = 1.0, (fault,), FOREVER
    assert "listing" in fails(lambda: store.list())
    brief = FaultPlan(rate=1.0, faults=(fault,), in_a_row=2)
    assert ends(lambda: faulty(brief, IMPATIENT).list()) == ["a", "b"]
    assert brief.counts[fault] >= 1


def test_a_listing_of_unfinished_uploads_without_an_end_ends(
    faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_EMPTY_PAGES", 5, raising=False)
    store = faulty(FaultPlan(rate=1.0, faults=("endless",), in_a_row=FOREVER), IMPATIENT)
    assert "listing of empty pages" in fails(lambda: store.discard_unfinished("", lambda key: True))


def test_a_body_of_one_byte_a_second_is_given_up_and_the_next_connection_continues(
    faulty: Callable[..., Store],
) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, HURRIED)
    store.write("x", DATA)
    slow = FaultPlan(rate=1.0, faults=("dribble",), in_a_row=1, drip_s=0.1)
    assert ends(lambda: _reopened(store, faulty, slow).read("x")) == DATA
    slow.in_a_row = FOREVER
    store = _reopened(store, faulty, slow)
    assert "slower than 16,384 bytes/s; check the network" in fails(lambda: store.read("x"))
    assert "no complete answer in 1 s; check the network" in fails(lambda: store.list())
    assert slow.counts["dribble"] == 1 + 2 * 3


def _reopened(store: Store, faulty: Callable[..., Store], plan: FaultPlan) -> Store:
    """Return `store`, which has its connections already, behind the faults of `plan`."""
    faulty(plan)
    return store


def test_an_upload_that_goes_out_too_slowly_is_given_up(
    faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 reads a block of the body when the connection has taken the one before it."""
    store = faulty(FaultPlan(rate=0.0), IMPATIENT)
    store.write("x", b"before")
    read = requests.PacedBody.read

    def read_slowly(body: requests.PacedBody, size: int | None = -1) -> bytes:
        body._block_read -= 61.0  # as if the connection had taken 61 s for the block before
        return read(body, size)

    monkeypatch.setattr(requests.PacedBody, "read", read_slowly)
    message = fails(lambda: store.write("x", bytes(1 << 20)))
    assert "slower than 16,384 bytes/s; check the network to the service" in message
    monkeypatch.undo()
    assert store.read("x") == b"before"


@pytest.mark.parametrize(("fault", "num_attempts"), [("expired", 4), ("revoked", 2), ("skewed", 2)])
def test_credentials_and_a_clock_that_were_good_are_waited_for(
    fault: str, num_attempts: int, faulty: Callable[..., Store]
) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, PATIENT)
    store.write("x", DATA)
    plan.rate, plan.faults, plan.in_a_row = 1.0, (fault,), num_attempts
    assert ends(lambda: store.read("x")) == DATA
    assert plan.counts[fault] == num_attempts


@pytest.mark.parametrize("fault", ["revoked", "skewed", "moved"])
def test_what_never_worked_is_the_users_mistake_at_once(fault: str, faulty: Callable[..., Store]) -> None:
    store = faulty(FaultPlan(rate=1.0, faults=(fault,), in_a_row=FOREVER), PATIENT)
    with pytest.raises(StoreError, match=r"credentials not accepted|clock is wrong|in another region") as caught:
        store.read("x")
    assert not isinstance(caught.value, StorageLost)
    assert store.patience.retries == 0


def test_a_storm_of_slow_down_is_survived_by_many_readers(faulty: Callable[..., Store]) -> None:
    plan = FaultPlan(rate=0.0)
    store = faulty(plan, PATIENT)
    store.write("x", DATA)
    plan.rate, plan.faults, plan.in_a_row = 1.0, ("slowdown",), FOREVER
    threading.Timer(1.0, lambda: setattr(plan, "rate", 0.0)).start()
    read: list[bytes] = []
    threads = [threading.Thread(target=lambda: read.append(store.read("x"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [DATA] * 16
    assert plan.counts["slowdown"] == store.patience.retries


def test_a_wait_is_reported_from_its_first_second_and_while_a_request_has_no_answer(bucket: str) -> None:
    """The status page shows what `on_wait` writes into the heartbeat; four threads read for the one that waits."""
    patience = Patience(2.5, note=lambda line: None)
    reports: list[tuple[float, str]] = []
    patience.reporter.on_wait = lambda reason: reports.append((patience.retry_wait_s, reason))
    store = open_store(f"{bucket}/x", "http://127.0.0.1:9", patience)
    with pytest.raises(StorageLost):
        in_parallel(store.read, ["x"] * 4)
    assert reports[0][0] < 1.0  # all pauses until then, of four threads together: a busy machine changes none of them
    assert "the service cannot be reached" in reports[0][1]
    assert 3 <= len(reports) <= 8  # one a second, of all threads together
    assert reports[-1][1] == ""

    # The first try fails, and the second one has no answer for some seconds.
    reports.clear()
    with patience.outage() as outage:
        outage.wait_after(StoreAway("the service cannot be reached"))
        requests.call_within(10.0, lambda: time.sleep(2.5), patience)
        assert len(reports) >= 2
    assert reports[-1][1] == ""


def test_the_end_of_a_run_ends_a_wait_in_the_middle_of_a_request() -> None:
    patience = Patience(600.0, note=lambda line: None)
    threading.Timer(0.3, patience.abandon).start()

    def wait() -> None:
        with patience.outage() as outage:
            outage.wait_after(StoreAway("the service cannot be reached"))
            requests.call_within(60.0, lambda: time.sleep(30.0), patience)

    with pytest.raises(requests.Again, match="the run ends"):
        ends(wait, within_s=10.0)


def test_the_end_of_a_run_ends_a_first_try_without_an_answer() -> None:
    """Such as the request that combines the parts of an upload, whose answer may take ten minutes."""
    patience = Patience(600.0, note=lambda line: None, pace=Pace(rate_window_s=0.5))
    threading.Timer(0.1, patience.abandon).start()
    with pytest.raises(requests.Again, match="the run ends"):
        ends(lambda: requests.call_within(600.0, lambda: time.sleep(30.0), patience), within_s=10.0)


def test_a_name_that_is_not_resolved_at_the_start_is_waited_for_and_said(
    bucket: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    resolve = socket.getaddrinfo
    attempts: list[str] = []

    def resolve_late(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "storage.invalid":
            return resolve(host, *arguments, **options)
        attempts.append(host)
        if len(attempts) <= 12:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return resolve("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    endpoint = proxy.endpoint_url.replace("127.0.0.1", "storage.invalid")
    policy = Pace(first_pause_s=0.01, longest_pause_s=0.05)
    store = open_store(f"{bucket}/p", endpoint, Patience(60.0, pace=policy))
    assert store.list() == []
    assert len(attempts) >= 13
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    expected = (
        r"waiting up to 60 s for storage: s3://\S+ at storage.invalid:\d+: the name .* cannot be resolved; check"
    )
    assert re.match(expected, lines[0])
    assert re.match(r"storage is back after \d s: s3://\S+ at storage.invalid:\d+: the name", lines[1])


@pytest.fixture
def https_proxy(proxy: FaultProxy, tmp_path: Path) -> str:
    """The fault proxy behind https, with a certificate that nobody has signed; its URL."""
    return serve_https(proxy, tmp_path)


def test_a_certificate_that_is_not_accepted_is_named_at_once(
    bucket: str, https_proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure() -> str:
        store = open_store(f"{bucket}/p", https_proxy, Patience(60.0, pace=IMPATIENT))
        with pytest.raises(StoreError) as caught:
            ends(lambda: store.read("x"))
        assert not isinstance(caught.value, StorageLost)
        assert store.patience.retries == 0
        return str(caught.value)

    assert re.search(r" at 127.0.0.1:\d+: the certificate of the service is not accepted .*AWS_CA_BUNDLE", failure())
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nowhere.pem"))
    assert "correct AWS_CA_BUNDLE" in failure()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
    store = open_store(f"{bucket}/p", https_proxy, Patience(60.0, pace=IMPATIENT))
    ends(lambda: store.read_or_none("x"))  # there is no such object; the certificate is accepted


def test_https_to_a_service_without_it_is_said(bucket: str, proxy: FaultProxy) -> None:
    store = open_store(f"{bucket}/p", proxy.endpoint_url.replace("http:", "https:"), Patience(60.0, pace=IMPATIENT))
    assert "no encrypted connection can be made; check whether the service speaks https" in fails(lambda: store.list())


def test_an_upload_in_parts_that_fails_in_the_middle_leaves_no_parts(
    faulty: Callable[..., Store], s3: s3_server.S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_store, "_MULTIPART_FROM", 1 << 20)
    monkeypatch.setattr(s3_store, "PART_BYTES", 5 << 20)
    path = tmp_path / "big"
    path.write_bytes(bytes(12 << 20))
    plan = FaultPlan(rate=1.0, faults=("slowdown",), in_a_row=FOREVER)
    store = faulty(plan, IMPATIENT)
    draw = plan.draw
    num_parts = 0

    def fail_after_the_first_part(method: str, key: str) -> tuple[str | None, float]:
        nonlocal num_parts
        if method != "PUT":
            return None, 0.0
        num_parts += 1
        return draw(method, key) if num_parts > 1 else (None, 0.0)

    monkeypatch.setattr(plan, "draw", fail_after_the_first_part)
    assert "503 SlowDown" in fails(lambda: store.upload(path, "big"))
    assert num_parts > 3
    bucket_name = store.url.removeprefix("s3://").partition("/")[0]
    assert "Uploads" not in s3_server.client(*s3).list_multipart_uploads(Bucket=bucket_name)
    assert store.list() == []
