"""Waits for storage: what is waited for, for how long, what is shown, and how a wait ends."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from electra_dist.config import load
from electra_dist.config.load import read_yaml
from electra_dist.errors import StorageLost, StoreAway, StoreError, UserError
from electra_dist.store import patience as patience_module
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore, open_store
from electra_dist.store.patience import Pace, Patience


class Clock:
    """Clock that moves on only when something waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    def sleep(self: Patience, pause_s: float) -> None:
        clock.now += pause_s
        self.reporter.beat()

    monkeypatch.setattr(Patience, "sleep", sleep)
    return clock


def failing(errors: list[Exception], value: int = 7) -> Callable[[], int]:
    """Return a function that raises the errors one after another, and then returns the value."""

    def function() -> int:
        if errors:
            raise errors.pop(0)
        return value

    return function


def test_an_operation_is_repeated_until_storage_is_back(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("electra_dist.store.patience._BEAT_S", 0.0)  # every pause is reported
    lines: list[str] = []
    reasons: list[str] = []
    patience = Patience(60.0, lines.append, clock)
    patience.reporter.on_wait = reasons.append
    assert patience.call(failing([StoreAway("a: disk full; free it"), OSError(5, "EIO")])) == 7
    assert 0.0 < clock.now <= 3 * patience.pace.first_pause_s
    assert (patience.retries, patience.retry_wait_s) == (2, clock.now)
    assert reasons == ["a: disk full; free it"] * 2 + [""]
    assert lines == [
        "waiting up to 60 s for storage: a: disk full; free it",
        "storage is back after 0 s: a: disk full",
    ]
    assert patience.reporter.reason == ""


def test_the_first_error_is_the_one_of_the_end(clock: Clock) -> None:
    patience = Patience(60.0, lambda line: None, clock)
    errors: list[Exception] = [StoreAway("first"), *(StoreAway("later") for _ in range(100))]
    with pytest.raises(StorageLost, match=r"^first; storage was waited for 60 s"):
        patience.call(failing(errors))
    assert clock.now == 60.0
    assert patience.reporter.reason == ""


def test_an_operation_that_gave_up_with_a_shorter_patience_is_repeated(
    clock: Clock,
) -> None:
    outer = Patience(60.0, lambda line: None, clock)
    inner = Patience(5.0, lambda line: None, clock)
    with pytest.raises(StorageLost, match=r"^away; storage was waited for 6\d s \(cluster.storage_patience_s 60\)$"):
        outer.call(lambda: inner.call(failing([StoreAway("away")] * 1000)))  # type: ignore[list-item]
    with pytest.raises(StorageLost, match=r"^away; storage was waited for 60 s"):
        outer.call(lambda: outer.call(failing([StoreAway("away")] * 1000)))  # type: ignore[list-item]


def test_what_no_wait_cures_is_raised_at_once(clock: Clock) -> None:
    patience = Patience(60.0, lambda line: None, clock)
    for error in (StoreError("permission"), PermissionError(13, "x"), RuntimeError("bug")):
        with pytest.raises(type(error)):
            patience.call(failing([error]))
    with pytest.raises(StoreError, match="permission"):
        patience.call(failing([StoreAway("full"), StoreError("permission")]))
    assert patience.reporter.reason == ""


def test_without_patience_the_first_failure_ends_the_run_without_a_line(clock: Clock) -> None:
    lines: list[str] = []
    with pytest.raises(StorageLost, match=r"^full$"):
        Patience(0.0, lines.append, clock).call(failing([StoreAway("full")]))
    assert lines == []


def test_a_wait_in_another_thread_is_seen_and_can_be_abandoned() -> None:
    """The real pause is cut short when the run ends for another reason."""
    patience = Patience(600.0, lambda line: None)
    ends: list[str] = []

    def wait() -> None:
        try:
            patience.call(failing([StoreAway("full")] * 1000))  # type: ignore[list-item]
        except StorageLost as lost:
            ends.append(str(lost))

    thread = threading.Thread(target=wait)
    thread.start()
    while not patience.reporter.reason:
        assert thread.is_alive()
    assert patience.reporter.reason == "full"
    patience.abandon()
    thread.join(timeout=10.0)
    assert ends and ends[0].startswith("full; storage was waited for")


def test_the_owner_reports_the_wait_of_a_thread_whose_result_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a supervisor would take an evaluation for hung whose rows are fetched by a thread that waits."""
    monkeypatch.setattr("electra_dist.store.patience._BEAT_S", 0.02)
    is_back = threading.Event()
    shown: list[str] = []

    def fetch() -> str:
        if not is_back.is_set():
            raise StoreAway("s3://bucket: no answer")
        return "rows"

    def on_wait(reason: str) -> None:
        shown.append(reason)
        is_back.set()

    patience = Patience(60.0, note=lambda line: None, pace=Pace(first_pause_s=0.02))
    patience.reporter.on_wait = on_wait
    with ThreadPoolExecutor(1) as pool:
        assert patience.reporter.wait_for(pool.submit(patience.call, fetch)) == "rows"
    assert shown[0] == "s3://bucket: no answer"
    assert shown[-1] == ""


def test_a_wait_is_reported_while_an_operation_within_the_repeated_one_pauses(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a page of a listing that is begun again: the page waits by itself, up to the whole limit."""
    monkeypatch.setattr("electra_dist.store.patience._BEAT_S", 0.0)
    patience = Patience(60.0, lambda line: None, clock)
    with patience.outage() as listing:
        listing.wait_after(StoreAway("s3://bucket: no answer"))
        shown: list[str] = []
        patience.reporter.on_wait = shown.append
        assert patience.call(failing([StoreAway("s3://bucket: busy")])) == 7
        assert shown == ["s3://bucket: no answer"]


def test_a_config_file_that_cannot_be_read_for_now_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The reader of configs raises a UserError in place of the OSError; `Patience` must still recognize an outage."""
    file = tmp_path / "config.yaml"
    file.write_text("{}")
    errors = [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error")]
    read = load.read_regular

    def stale(path: Path, most_bytes: int) -> bytes:
        """Raise the next of `errors`; read the file if none is left."""
        if errors:
            raise errors.pop()
        return read(path, most_bytes)

    monkeypatch.setattr(load, "read_regular", stale)
    assert Patience(60.0, note=lambda line: None).call(lambda: read_yaml(file)) == {}
    assert errors == []
    errors.append(PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(UserError, match="cannot be read"):
        Patience(60.0, note=lambda line: None).call(lambda: read_yaml(file))


OPERATIONS: dict[str, Callable[[Store, Path], object]] = {
    "read": lambda store, path: store.read("a"),
    "read_range": lambda store, path: store.read_range("a", 0, 1),
    "exists": lambda store, path: store.exists("a"),
    "size": lambda store, path: store.size("a"),
    "sizes": lambda store, path: store.sizes(),
    "list": lambda store, path: store.list(),
    "fetch": lambda store, path: store.fetch("a", path / "fetched"),
    "write": lambda store, path: store.write("b", b"2"),
    "write_new": lambda store, path: store.write_new("b", b"2"),
    "upload": lambda store, path: store.upload(path / "store" / "a", "b"),
    "delete": lambda store, path: store.delete("a"),
    "discard_unfinished": lambda store, path: store.discard_unfinished("", lambda key: True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_of_a_store_in_a_folder_waits_by_itself(
    name: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole disk does not respond for five tries."""
    patience = Patience(60.0, lambda line: None, clock)
    store = open_store(str(tmp_path / "store"), None, patience)
    store.write("a", b"1")
    errors = [OSError(errno.EIO, "Input/output error", str(tmp_path)) for _ in range(5)]

    def refusing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if errors:
                raise errors.pop()
            return function(*args, **kwargs)

        return call

    for function in ("open", "stat", "scandir", "unlink"):
        monkeypatch.setattr(os, function, refusing(getattr(os, function)))
    monkeypatch.setattr("builtins.open", refusing(open))
    OPERATIONS[name](store, tmp_path)
    assert errors == []
    assert patience.retries >= 1


def faults(texts: list[str]) -> Callable[[], tuple[bytes, str]]:
    """Return a function that reads bytes with these faults one after another, and then good ones."""
    return lambda: (b"bytes", texts.pop(0) if texts else "")


def test_wrong_bytes_are_read_again_and_are_damaged_if_they_stay_the_same(clock: Clock) -> None:
    store = LocalStore(Path("b"), Patience(60.0, lambda line: None, clock))
    assert store.reread("f/x", faults(["a", "b", "a", "b"])) == (b"bytes", "")
    assert store.reread("f/x", faults(["a", "b", "a", "b", "b"])) == (b"bytes", "b")


def test_bytes_that_are_wrong_in_different_ways_are_waited_for(clock: Clock) -> None:
    store = LocalStore(Path("b"), Patience(60.0, lambda line: None, clock))
    assert store.reread("f/x", faults([str(number) for number in range(17)])) == (b"bytes", "")
    assert store.patience.retries == 3
    with pytest.raises(
        StorageLost, match=r"^b/f/x was read 5 times and was wrong in different ways, last: 4; check the n"
    ):
        store.reread("f/x", faults([str(number) for number in range(10_000)]))


def test_after_damage_was_confirmed_its_folder_is_read_again_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(Path("b"), Patience(60.0, lambda line: None))
    pauses: list[float] = []
    monkeypatch.setattr(store.patience, "sleep", pauses.append)
    store.reread("f/x", faults(["a"] * 5))
    assert len(pauses) == 4
    store.reread("f/y", faults(["a"] * 5))
    assert len(pauses) == 4
    store.reread("g/y", faults(["a"] * 5))
    assert len(pauses) == 8


def test_a_function_with_a_patience_waits_by_itself_and_without_one_fails_at_once(clock: Clock) -> None:
    errors: list[Exception] = []

    @patience_module.patient
    def read(number: int, *, patience: Patience | None = None) -> int:
        if errors:
            raise errors.pop(0)
        return number

    errors += [StoreAway("d/a: disk full"), StoreAway("d/a: disk full")]
    assert read(5, patience=Patience(60.0, [].append, clock)) == 5
    errors.append(StoreAway("d/a: disk full"))
    with pytest.raises(StoreAway):
        read(5)
