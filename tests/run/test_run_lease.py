"""The lease of a run folder: one owner at a time, on any machine, in any container and whatever the clocks say."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from electra_dist.errors import UserError
from electra_dist.run import lease as run_lease
from electra_dist.run.lease import LeaseLost, RunLease, create, find_newest, join_lease, read_owner, take_lease
from electra_dist.store.atomic_files import lock_file

FOREVER_S = 1e9
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals every 0.1 s; a lease expires 0.6 s (on its machine 0.3 s) later; a wait is announced at once."""
    monkeypatch.setattr(run_lease, "RENEW_S", 0.1)
    monkeypatch.setattr(run_lease, "LEASE_S", 0.6)
    monkeypatch.setattr(run_lease, "LOCAL_LEASE_S", 0.3)
    monkeypatch.setattr(run_lease, "_POLL_S", 0.02)
    monkeypatch.setattr(run_lease, "_SAY_AFTER_S", -1.0)


def take(run_dir: Path, **options: Any) -> RunLease:
    """Take the lease of a folder without a word."""
    return take_lease(run_dir, "rank 0", say=lambda line: None, **options)


def forge(run_dir: Path, renewed: float | None = None, **fields: object) -> Path:
    """Write the lease of an owner that is described like this process except for `fields`; return its file."""
    created = create(run_dir / "lease", find_newest(run_dir / "lease").number + 1, "supervisor")
    assert created is not None
    lease, lock = created
    os.close(lock)
    owner = lease.owner
    assert owner is not None
    lease.path.write_text(json.dumps({**owner.model_dump(), **fields}))
    if renewed is not None:
        os.utime(lease.path, (renewed, renewed))
    return lease.path


def hold_until_killed(run_dir: Path, ready: Connection) -> None:
    """Take a lease in a child process, report the end of the attempt, and wait."""
    try:
        lease = take(run_dir)
    except UserError as error:
        ready.send(str(error))
        return
    ready.send(lease.token)
    while not lease.is_lost:
        time.sleep(0.02)
    try:
        lease.check()
    except LeaseLost as error:
        ready.send(str(error))


def start_holder(run_dir: Path) -> tuple[Any, Connection]:
    """Start a process that takes the lease; return it and the connection on which it reports."""
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=hold_until_killed, args=(run_dir, sender))
    process.start()
    sender.close()
    return process, receiver


def test_of_six_starts_at_once_one_gets_the_lease_and_the_others_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "LEASE_S", FOREVER_S)
    holders = [start_holder(tmp_path) for _ in range(6)]
    answers = [connection.recv() for _, connection in holders]
    for process, _ in holders:
        process.kill()
        process.join()
    owner = run_lease.LeaseOwner(**json.loads((tmp_path / "lease" / "000001.json").read_text()))
    assert answers.count(owner.token) == 1
    refusals = [answer for answer in answers if answer != owner.token]
    assert len(refusals) == 5
    assert all(f"host {owner.host}, pid {owner.pid}" in refusal and "\n" not in refusal for refusal in refusals)


def test_a_killed_owner_on_this_machine_is_replaced_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "LEASE_S", FOREVER_S)
    process, connection = start_holder(tmp_path)
    token = connection.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found = read_owner(tmp_path)
    assert found is not None and found[0].token == token  # status still shows it
    lease = take(tmp_path)
    assert lease.token != token
    lease.release()
    assert read_owner(tmp_path) is None


def test_a_stopped_owner_keeps_the_lease_for_as_long_as_one_of_another_machine_and_then_notices_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock shows that it has not ended, so the short limit of this machine does not count."""
    monkeypatch.setattr(run_lease, "LOCAL_LEASE_S", 0.0)
    process, connection = start_holder(tmp_path)
    connection.recv()
    os.kill(process.pid, signal.SIGSTOP)
    try:
        stopped = find_newest(tmp_path / "lease")
        assert not stopped.is_free(0.6) and stopped.is_free(0.7)
        lease = take(tmp_path)
        os.kill(process.pid, signal.SIGCONT)
        assert "taken over by another start" in connection.recv()
        lease.release()
    finally:
        process.kill()
        process.join()


def test_a_lost_lock_is_no_proof_that_the_owner_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may lose the lock of an owner that goes on."""
    monkeypatch.setattr(run_lease, "LOCAL_LEASE_S", FOREVER_S)
    lease = take(tmp_path)
    assert lease._lock is not None
    os.close(lease._lock)
    lease._lock = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(UserError, match=f"pid {os.getpid()}"):
        take(tmp_path)
    lease.release()


@pytest.mark.parametrize("clock_error_s", [-86_400.0, 0.0, 3600.0])
def test_an_owner_on_another_host_of_the_same_name_is_waited_for_and_then_replaced(
    tmp_path: Path, clock_error_s: float
) -> None:
    forge(tmp_path, renewed=time.time() + clock_error_s, boot_id="of another machine", pid=4711)
    lines: list[str] = []
    lease = take_lease(tmp_path, "rank 0", say=lines.append)
    (line,) = lines
    assert "waiting for the lease" in line and "pid 4711" in line
    lease.check()
    lease.release()


def test_an_owner_on_another_host_that_renews_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "LEASE_S", FOREVER_S)
    process, connection = start_holder(tmp_path)
    connection.recv()
    file = tmp_path / "lease" / "000001.json"
    try:
        # Renewed by this process, because the owner would notice that its file has another content.
        os.kill(process.pid, signal.SIGSTOP)
        file.write_text(json.dumps({**json.loads(file.read_text()), "boot_id": "of another machine"}))
        renewals = FORK.Process(target=renew_forever, args=(file,))
        renewals.start()
        with pytest.raises(UserError, match="trains in this folder"):
            take(tmp_path)
        renewals.kill()
        renewals.join()
    finally:
        process.kill()
        process.join()


def renew_forever(file: Path) -> None:
    """Renew a lease as its owner does."""
    while True:
        run_lease.renew(file)
        time.sleep(0.1)


def test_the_lock_shows_whether_an_owner_in_another_container_of_this_machine_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forge(tmp_path, pid=1)
    with path.open("r+b") as owner_file:
        assert lock_file(owner_file, wait=False)
        assert not find_newest(tmp_path / "lease").is_free(0.5)
    monkeypatch.setattr(run_lease, "LEASE_S", FOREVER_S)
    take(tmp_path).release()


def test_a_copy_of_the_folder_of_a_run_that_goes_on_is_free_once_nothing_renews_it(tmp_path: Path) -> None:
    first = take(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    take(tmp_path / "copy").release()
    first.check()
    first.release()


def test_a_start_that_takes_over_waits_for_the_end_of_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "LEASE_S", FOREVER_S)
    first = take(tmp_path)
    polls = iter(range(1000))

    def release_later() -> bool:
        if next(polls) == 20:  # after several renewals
            first.release()
        return False

    second = take(tmp_path, take_over_s=FOREVER_S, give_up=release_later)
    second.check()
    second.release()
    forge(tmp_path, boot_id="of another machine")
    with pytest.raises(KeyboardInterrupt):
        take(tmp_path, give_up=lambda: True)


def test_a_lease_expires_after_its_last_renewal_and_not_after_the_begin_of_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner on another host renews every 0.4 s of a simulated clock, six times, and is silent then."""
    path = forge(tmp_path, boot_id="of another machine")
    clock_s = 100.0
    renewals: list[float] = []
    tries: list[float] = []  # times at which the lease was to be taken

    def sleep(seconds: float) -> None:
        nonlocal clock_s
        clock_s += seconds
        if len(renewals) < 6 and clock_s >= 100.0 + 0.4 * (len(renewals) + 1):
            renewals.append(clock_s)
            os.utime(path, (clock_s, clock_s))

    monkeypatch.setattr(run_lease, "time", SimpleNamespace(monotonic=lambda: clock_s, sleep=sleep))
    monkeypatch.setattr(run_lease, "create", lambda *arguments: tries.append(clock_s))
    with pytest.raises(KeyboardInterrupt):
        take(tmp_path, take_over_s=FOREVER_S, give_up=lambda: bool(tries))
    assert len(renewals) == 6
    assert run_lease.LEASE_S < tries[0] - renewals[-1] < run_lease.LEASE_S + 3 * run_lease._POLL_S


def test_an_owner_that_was_replaced_notices_it_and_leaves_the_lease_of_the_other(tmp_path: Path) -> None:
    lease = take(tmp_path)
    rank = join_lease(tmp_path, lease.token)
    lease.check()
    rank.check()
    path = forge(tmp_path, pid=4711)
    for loser in (lease, rank):
        wait_until_lost(loser)
        with pytest.raises(LeaseLost, match=r"taken over by another start: supervisor on host .*pid 4711"):
            loser.check()
        loser.release()
    assert path.exists()
    with pytest.raises(LeaseLost, match="has lost its lease to"):
        join_lease(tmp_path, lease.token)


def wait_until_lost(lease: RunLease) -> None:
    """Wait until a lease is lost, for up to 10 s."""
    deadline = time.monotonic() + 10
    while not lease.is_lost and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("elsewhere"))])
def test_a_folder_that_is_deleted_or_moved_ends_the_lease_and_is_not_created_again(
    tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    run_dir = tmp_path / "run"
    lease = take(run_dir)
    lose(run_dir)
    with pytest.raises(LeaseLost, match="was deleted or moved"):
        lease.check()
    lease.release()
    assert not run_dir.exists()


def test_a_lease_file_that_a_person_deleted_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "LEASE_S", FOREVER_S)
    lease = take(tmp_path)
    shutil.rmtree(tmp_path / "lease")
    lease.check()
    found = read_owner(tmp_path)
    assert found is not None and found[0].token == lease.token
    with pytest.raises(UserError, match=f"pid {os.getpid()}"):
        take(tmp_path)
    lease.release()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"token": 1}', b"\xff\x00", b"[" * 100_000, b"9" * 10_000],
    ids=["empty", "torn", "list", "null", "fields", "bytes", "deep", "huge"],
)
def test_a_damaged_lease_is_waited_for_like_that_of_an_unknown_owner(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "lease"
    folder.mkdir()
    (folder / "000003.json").write_bytes(content)
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / ".000003.json.0a1b2c3d.tmp").write_bytes(b"left by a killed start")
    assert read_owner(tmp_path) is None
    lines: list[str] = []
    lease = take_lease(tmp_path, "rank 0", say=lines.append)
    assert "damaged" in lines[0]
    assert sorted(path.name for path in folder.iterdir()) == [".DS_Store", "000004.json"]
    lease.release()


@pytest.mark.parametrize("field", ["since", "pid", "host"])
def test_a_lease_with_a_senseless_value_has_no_owner(tmp_path: Path, field: str) -> None:
    forge(tmp_path, **{field: 10**40})
    assert read_owner(tmp_path) is None
    take(tmp_path).release()


@pytest.mark.parametrize("foreign", [Path.mkdir, lambda path: path.symlink_to("nowhere")], ids=["folder", "link"])
def test_a_foreign_folder_or_link_with_the_name_of_a_lease_is_an_error_of_one_line(
    tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    (tmp_path / "lease").mkdir()
    foreign(tmp_path / "lease" / "000003.json")
    with pytest.raises(UserError, match="lease"):
        take(tmp_path)


def test_a_folder_in_which_no_run_was_begun_is_removed_by_the_release(tmp_path: Path) -> None:
    take(tmp_path / "new").release()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").touch()
    take(tmp_path / "old").release()
    assert (tmp_path / "old" / "lease" / "000001.released").exists()
