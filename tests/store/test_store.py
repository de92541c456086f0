"""The contract of every store, tested on a local folder, on a real S3 server and on an emulator of Azure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from electra_dist.errors import StoreError, StoreMissing, UserError
from electra_dist.store import atomic_files, cloud_store
from electra_dist.store.atomic_files import create_file, replacing, writable
from electra_dist.store.interface import Store, check_key, in_parallel
from electra_dist.store.open_store import LocalStore, open_store
from electra_dist.store.s3 import s3_store

OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "", "a/", "a\\..\\b", "a\nb", "\x00"]


def test_objects_are_read_back_as_written(store: Store) -> None:
    for key, data in {"a": b"1", "deep/er/b": b"", "c": os.urandom(300_000)}.items():
        assert not store.exists(key)
        store.write(key, data)
        assert store.exists(key)
        assert store.size(key) == len(data)
        assert store.read(key) == data
        store.write(key, data + b"more")
        assert store.read(key) == data + b"more"


def test_pieces_in_memory_become_one_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except on a disk, the object is uploaded in parts, whose borders are not those of the pieces."""
    for module in (s3_store, cloud_store):
        monkeypatch.setattr(module, "_MULTIPART_FROM", 1 << 20)
    monkeypatch.setattr(s3_store, "PART_BYTES", 5 << 20)  # the smallest part that S3 allows
    sizes = (100, 0, 5 << 20, (5 << 20) - 100, 3, 12 << 20, 7)
    pieces = [memoryview(os.urandom(size)) for size in sizes]
    store.write_pieces("large", pieces)
    assert store.read("large") == b"".join(pieces)
    store.write_pieces("small", [b"1", memoryview(b"23"), b""])
    assert store.read("small") == b"123"
    store.write_pieces("empty", [])
    assert store.read("empty") == b""


def test_listing_is_by_string_prefix_and_sorted_without_deleted_keys(store: Store) -> None:
    assert store.list() == []
    for key in ("step-2/b", "step-10/a", "step-1/a", "other"):
        store.write(key, b"x")
    assert store.list() == ["other", "step-1/a", "step-10/a", "step-2/b"]
    assert store.list("step-1") == ["step-1/a", "step-10/a"]
    assert store.list("step-1/") == ["step-1/a"]
    assert store.list("nothing/there") == []
    store.delete("step-1/a")
    store.delete("step-1/a")
    assert store.list("step-1/") == []


def test_a_listing_has_the_sizes_of_the_objects(store: Store) -> None:
    for key, content in [("sizes/b", b"12345"), ("sizes/a", b""), ("size", b"1")]:
        store.write(key, content)
    assert [*store.sizes("sizes/").items()] == [("sizes/a", 0), ("sizes/b", 5)]


def test_a_local_listing_has_the_size_of_a_file_whose_name_is_no_key_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a\\b.txt").write_bytes(b"123")
    assert open_store(str(tmp_path)).sizes() == {"a\\b.txt": 3}


def test_an_uploaded_file_is_fetched_unchanged(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_store, "_MULTIPART_FROM", 1 << 20)
    monkeypatch.setattr(cloud_store, "PART_BYTES", 1 << 20)
    source, back = tmp_path / "source", tmp_path / "new" / "back"
    source.write_bytes(os.urandom(3 << 20))
    store.upload(source, "x/file")
    store.fetch("x/file", back)
    assert back.read_bytes() == source.read_bytes()
    assert list(back.parent.iterdir()) == [back]


def test_a_range_is_that_part_of_the_object_and_ends_at_its_end(store: Store) -> None:
    data = os.urandom(300_000)
    store.write("x", data)
    store.write("empty", b"")
    for start, length in ((0, 300_000), (0, 1), (299_999, 1), (123, 200_000), (299_000, 5000), (300_000, 10), (5, 0)):
        part = store.read_range("x", start, length)
        assert part == data[start : start + length]
        assert not part.readonly
    assert store.read_range("x", 10**9, 10) == b""
    assert store.read_range("empty", 0, 10) == b""


@pytest.mark.parametrize("missing", ["read", "size", "fetch", "read_range"])
def test_missing_object_is_named(store: Store, missing: str, tmp_path: Path) -> None:
    store.write("there", b"")
    arguments = ["not/there", *{"fetch": [tmp_path / "out"], "read_range": [0, 5]}.get(missing, [])]
    if isinstance(store, LocalStore):
        reason, num_retries = "no such file; check", 0
    elif missing == "size":  # the caller does not know that the object exists
        reason, num_retries = "no such object; check", 0
    else:
        reason, num_retries = "no such object, 5 times; restore", 4
    with pytest.raises(StoreMissing, match=f"/not/there.*: {reason}"):
        getattr(store, missing)(*arguments)
    assert store.patience.retries == num_retries
    assert not (tmp_path / "out").exists()


def test_exactly_one_of_eight_concurrent_write_new_calls_wins_and_its_bytes_are_stored(store: Store) -> None:
    """A commit relies on this guarantee; there are twenty rounds of eight threads."""
    for round_number in range(20):
        won: list[bytes] = []
        barrier = threading.Barrier(8)

        def race(data: bytes, key: str = f"commit/{round_number}", barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            if store.write_new(key, data):
                won.append(data)  # noqa: B023

        threads = [threading.Thread(target=race, args=(bytes([n]),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.read(f"commit/{round_number}") == won[0]
    assert not store.write_new("commit/0", b"late")


@pytest.mark.parametrize("key", OUTSIDE)
def test_keys_outside_the_store_are_refused(store: Store, key: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a relative path"):
        check_key(key)
    if store.local_path("x") is not None and ".." in key:
        with pytest.raises(StoreError, match="not a relative path"):
            store.list(f"{key}/")
    for call in (store.read, store.exists, store.delete, store.local_path, lambda k: store.write(k, b"")):
        with pytest.raises(StoreError, match="not a relative path"):
            call(key)


def test_local_errors_name_the_cause_and_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a folder; choose another path"):
        open_store(str(tmp_path / "file")).write("a", b"")
    with pytest.raises(StoreError, match="/dev/full: disk full; free space there"), writable(Path("/dev/full")):
        Path("/dev/full").write_bytes(b"x")
    for url, message in {
        "ftp://host/x": "ftp://.*local path, s3://, az:// or gs://",
        "az://": "az://.*not a container or bucket",
        "gs://key@bucket/x": "gs://.*not a container or bucket; .*without credentials",
        "az://container/../x": "not a relative path",
        "": "empty storage path",
        "s3://": "no bucket",
        "s3://bucket/../x": "not a relative path",
    }.items():
        with pytest.raises(UserError, match=message):
            open_store(url)


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    """The write is tried in a process of an ordinary user, because root may write anywhere."""
    folder = tmp_path / "readonly"
    folder.mkdir(mode=0o555)
    script = (
        "import os, sys; from electra_dist.store.open_store import open_store\n"
        "from electra_dist.errors import StoreError\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"try: open_store({str(folder)!r}).write('a', b'')\n"
        "except StoreError as error: sys.exit(str(error))"
    )
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid() and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"{folder}/a: not writable; give this user the right to write" in done.stderr


def test_a_folder_that_another_process_removes_before_the_first_file_is_in_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a node stage their files in one folder; each deletes its own, and the last one the folder."""
    make_folder = atomic_files.make_folder
    num_removed = 0

    def make_and_remove(folder: Path) -> None:
        """Create the folder; the first three times another process removes it."""
        nonlocal num_removed
        make_folder(folder)
        if num_removed < 3:
            num_removed += 1
            folder.rmdir()

    monkeypatch.setattr(atomic_files, "make_folder", make_and_remove)
    with replacing(tmp_path / "step-1" / "rank-0.json") as file:
        file.write(b"1")
    num_removed = 0
    with create_file(tmp_path / "step-2" / "rank-0.safetensors", "wb") as file:
        file.write(b"2")
    assert [file.read_bytes() for file in sorted(tmp_path.rglob("rank-*"))] == [b"1", b"2"]


def test_an_object_whose_writer_was_killed_has_its_old_or_new_bytes(tmp_path: Path) -> None:
    """The writer is killed at several moments; listings show no unfinished file."""
    script = (
        "import sys; from electra_dist.store.open_store import open_store\n"
        "store = open_store(sys.argv[1]); n = 0\n"
        "while True: n += 1; store.write('k', bytes([n % 251]) * 400_000); print(n, flush=True)"
    )
    for delay_ms in range(0, 12, 3):
        folder = tmp_path / str(delay_ms)
        writer = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        threading.Event().wait(delay_ms / 1000)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = open_store(str(folder)).read("k")
        assert len(data) == 400_000
        assert len(set(data)) == 1
        assert open_store(str(folder)).list() == ["k"]


def test_unfinished_writes_selected_by_doomed_are_discarded(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("step-1/kept", b"x")
    for folder, name in (("step-1", "a"), ("step-2", "b"), ("other", "c")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f".{name}.0a1b2c3d.tmp").write_bytes(b"half")
    asked: list[str] = []
    assert store.discard_unfinished("step-", lambda key: asked.append(key) or key == "step-2/b") == 1  # type: ignore[func-returns-value]
    assert sorted(asked) == ["step-1/a", "step-2/b"]
    assert not (tmp_path / "step-2").exists() and (tmp_path / "step-1" / ".a.0a1b2c3d.tmp").exists()
    assert store.discard_unfinished("other", lambda key: True) == 1
    assert store.list() == ["step-1/kept"]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_further_call_is_begun_after_a_failure(num_threads: int) -> None:
    """Each call may wait for storage as long as the patience allows, so those that have not begun must not begin."""
    begun: list[int] = []
    all_began = threading.Barrier(num_threads)

    def fail(item: int) -> None:
        begun.append(item)
        all_began.wait(60)
        raise StoreError(f"item {item}")

    with pytest.raises(StoreError, match="item 0"):
        in_parallel(fail, range(40), num_threads)
    assert sorted(begun) == list(range(num_threads))
