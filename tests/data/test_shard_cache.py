"""The shard cache of a node: each shard is fetched once, files are complete, and the size limit is respected."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fault_server import FaultPlan, FaultProxy
from support.remote_store import Remote

from electra_dist.config import DataConfig
from electra_dist.data import node_cache, shard_cache
from electra_dist.data.corpora import Corpora, StoredShard
from electra_dist.data.node_cache import NodeCache
from electra_dist.data.shard import Shard
from electra_dist.data.shard_cache import ShardCache, open_cache
from electra_dist.errors import ManifestMismatch, StoreAway, StoreError, StoreMissing
from electra_dist.store.atomic_files import file_sha256
from electra_dist.store.open_store import LocalStore, open_store
from electra_dist.store.patience import Patience

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def remote(corpus: Any) -> Remote:
    """The corpus behind a store from which it must be fetched."""
    return Remote(Path(corpus.store.url))


class Late(Remote):
    """Store in which one object arrives only after `may_arrive` is set."""

    def __init__(self, folder: Path, late: str) -> None:
        super().__init__(folder)
        self.late = late
        self.may_arrive = threading.Event()

    def fetch(self, key: str, destination: Path) -> None:
        if key == self.late:
            assert self.may_arrive.wait(30)
        super().fetch(key, destination)


def rows_through(cache: ShardCache) -> np.ndarray:
    """Return all rows of the corpus in corpus order, read through the cache."""
    shards = [cache.open(index) for index in range(len(cache.corpora.shards))]
    return np.concatenate([shard.rows(np.arange(shard.num_rows)) for shard in shards])


def files(folder: Path) -> set[str]:
    """Return the names of the files in a cache folder, without those of locks."""
    return {path.name for path in folder.iterdir() if path.name != "locks"}


def whole(corpus: Any) -> set[str]:
    """Return the names of the cache files of all shards of a corpus."""
    return {f"{entry.sha256}.tar" for entry in corpus.manifest.shards}


def test_local_corpora_are_read_in_place_without_a_cache_folder(corpus: Any, tmp_path: Path) -> None:
    cache = ShardCache(corpus.corpora, tmp_path / "cache", fetch_threads=2)
    assert (rows_through(cache) == corpus.rows).all()
    assert cache.open(3) is cache.open(3)
    cache.keep_only([3])
    assert (rows_through(cache) == corpus.rows).all()
    cache.close()
    assert not (tmp_path / "cache").exists()


def test_a_shard_that_is_open_costs_no_preparation_for_a_wait(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch asks for all shards of its window: with 64 of them, that preparation doubled the loader's time."""
    waits = []
    call = Patience.call
    monkeypatch.setattr(Patience, "call", lambda self, operation: waits.append(1) or call(self, operation))
    with closing(ShardCache(corpus.corpora, tmp_path, fetch_threads=1)) as cache:
        shard = cache.open(0)
        assert waits
        waits.clear()
        assert cache.open(0) is shard
        cache.read_rows(np.zeros(3, np.int64), np.arange(3))
        assert not waits


def test_remote_shards_are_fetched_once(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    for _ in range(2):
        cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=3)
        cache.prefetch(range(7))
        assert (rows_through(cache) == corpus.rows).all()
        cache.keep_only([])
        assert (rows_through(cache) == corpus.rows).all()
        cache.close()
    assert sorted(remote.fetched) == sorted(entry.name for entry in corpus.manifest.shards)
    assert files(tmp_path) == whole(corpus)


def test_many_processes_fetch_each_shard_once(
    build_corpus: Callable[..., Any], bucket: str, proxy: FaultProxy, s3: Any, tmp_path: Path
) -> None:
    """Four processes with the real S3 client request all shards at the same time, through a proxy that counts."""
    proxy.plan = FaultPlan(rate=0.0)
    corpus = build_corpus(open_store(bucket, s3.endpoint_url), [21, 5, 33, 1, 14])
    script = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from electra_dist.data.corpora import Corpora\n"
        "from electra_dist.data.shard_cache import ShardCache\n"
        "from electra_dist.data.manifest import read_manifest\n"
        "from electra_dist.store.open_store import open_store\n"
        "store = open_store(sys.argv[1], sys.argv[2])\n"
        "cache = ShardCache(Corpora.of(store, read_manifest(store)), Path(sys.argv[3]))\n"
        "cache.prefetch(range(5))\n"
        "for index in np.random.permutation(5): cache.open(index).rows(np.array([0]))\n"
    )
    command = [sys.executable, "-c", script, bucket, proxy.endpoint_url, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    num_requests = {path.rpartition("/")[2]: count for (_, path), count in proxy.plan._asked.items()}
    assert num_requests.pop("corpus.json") == 4
    assert set(num_requests.values()) == {1}
    assert files(tmp_path / "cache") == whole(corpus)


def fetch_everything(corpus: Any, folder: Path) -> None:
    """Fetch all shards slowly into a cache folder."""
    rows_through(
        ShardCache(Corpora.of(Remote(Path(corpus.store.url), 0.001), corpus.manifest), folder, fetch_threads=2)
    )


def test_a_cache_whose_users_were_killed_gives_correct_rows_and_removes_partial_files(
    corpus: Any, remote: Remote, tmp_path: Path
) -> None:
    """Processes are killed at 40 seeded moments while they fetch, two at a time."""
    moments = random.Random(1)
    unfinished = 0
    for _ in range(20):
        victims = [FORK.Process(target=fetch_everything, args=(corpus, tmp_path)) for _ in range(2)]
        for victim in victims:
            victim.start()
        for victim in victims:
            time.sleep(moments.uniform(0, 0.04))
            victim.kill()
            victim.join()
        if files(tmp_path) - whole(corpus):
            unfinished += 1
        for path in tmp_path.glob("*.tar"):
            if moments.random() < 0.7:
                path.unlink()
    assert unfinished > 5
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=2)
    assert (rows_through(cache) == corpus.rows).all()
    cache.close()
    assert files(tmp_path) == whole(corpus)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer"])
def test_damaged_files_are_fetched_again(corpus: Any, remote: Remote, tmp_path: Path, damage: str) -> None:
    fetch_everything(corpus, tmp_path)
    for path in tmp_path.glob("*.tar"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes({"flip": data, "cut": data[:700], "empty": b"", "longer": data + b"0"}[damage])
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=2)
    assert (rows_through(cache) == corpus.rows).all()
    assert len(remote.fetched) == 7
    cache.close()


def test_a_shard_that_is_wrong_at_every_fetch_is_named(corpus: Any, tmp_path: Path) -> None:
    shutil.copytree(corpus.store.url, tmp_path / "bad")
    remote = Remote(tmp_path / "bad")
    name = corpus.manifest.shards[4].name
    path = tmp_path / "bad" / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path / "cache", fetch_threads=2)
    with pytest.raises(ManifestMismatch, match=f"{name}: wrong bytes 5 times .*restore this shard") as caught:
        rows_through(cache)
    assert "\n" not in str(caught.value)
    assert cache.node_cache.refetches == 5
    assert remote.fetched.count(name) == 5
    cache.close()


def test_damage_in_a_local_corpus_names_the_file(corpus: Any, tmp_path: Path) -> None:
    shutil.copytree(corpus.store.url, tmp_path / "c")
    store = LocalStore(tmp_path / "c")
    path = tmp_path / "c" / corpus.manifest.shards[2].name
    data = bytearray(path.read_bytes())
    data[600] ^= 4
    path.write_bytes(data)
    with pytest.raises(ManifestMismatch, match=f"{path}: not the shard that corpus.json lists"):
        ShardCache(Corpora.of(store, corpus.manifest), tmp_path).open(2)
    path.unlink()
    with pytest.raises(StoreMissing, match=f"{path}: no such file"):
        ShardCache(Corpora.of(store, corpus.manifest), tmp_path).open(2)


def test_a_shard_with_fewer_rows_than_the_manifest_lists_is_refused(corpus: Any, tmp_path: Path) -> None:
    entries = list(corpus.manifest.shards)
    entries[1] = entries[1].model_copy(update={"rows": 6})
    manifest = corpus.manifest.model_copy(update={"shards": tuple(entries)})
    with pytest.raises(ManifestMismatch, match=r"5 rows, but corpus.json lists 6"):
        ShardCache(Corpora.of(corpus.store, manifest), tmp_path).open(1)


def test_a_limit_keeps_a_fixed_part_of_the_corpus(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    """The cache has room for three shards: two that stay and one in use. The folder never exceeds its limit."""
    size = max(entry.bytes for entry in corpus.manifest.shards)
    limit_bytes = 3 * size + 100
    digests = sorted(entry.sha256 for entry in corpus.manifest.shards)
    kept = {f"{digest}.tar" for digest in digests[:2]}
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1, limit_bytes=limit_bytes)
    for index in [0, 1, 2, 3, 4, 5, 6, 3, 5, 1, 0, 6, 2, 4]:
        shard = cache.open(index)
        assert len(shard.rows(np.array([0]))) == 1
        cache.keep_only([])
        assert sum(path.stat().st_size for path in tmp_path.glob("*") if path.is_file()) <= limit_bytes
    assert kept <= files(tmp_path)
    names_of_kept = {entry.name for entry in corpus.manifest.shards if entry.sha256 in digests[:2]}
    assert [remote.fetched.count(name) for name in names_of_kept] == [1, 1]
    cache.close()


def test_a_download_that_ends_while_another_makes_room_is_counted(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, first, second = corpus.manifest.shards[:3]
    limit_bytes = first.bytes + second.bytes
    assert old.bytes + second.bytes <= limit_bytes

    store = Late(Path(corpus.store.url), first.name)
    cache = NodeCache(tmp_path / "cache", limit_bytes)
    cache.ensure(StoredShard(store, old), verify=False)
    download = threading.Thread(target=cache.ensure, args=(StoredShard(store, first),), kwargs={"verify": False})
    download.start()
    while f"{first.sha256}.unverified" not in files(tmp_path / "cache"):
        time.sleep(0.001)
    list_files = node_cache._files

    def list_and_let_the_download_arrive(directory: Path) -> list[Path]:
        listed = list_files(directory)
        store.may_arrive.set()
        download.join(0.3)
        return listed

    monkeypatch.setattr(node_cache, "_files", list_and_let_the_download_arrive)
    cache.ensure(StoredShard(store, second), verify=False)
    download.join()
    assert files(tmp_path / "cache") == {f"{first.sha256}.tar", f"{second.sha256}.tar"}


def test_shards_of_other_corpora_are_evicted_first(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    """Of shards of other corpora, the least recently used one is deleted first, whatever the digests are."""
    sizes = [entry.bytes for entry in corpus.manifest.shards]
    others = [tmp_path / f"{number:064x}.tar" for number in (2, 0, 1)]
    for age, path in enumerate(others):
        path.write_bytes(b"x" * min(sizes))
        os.utime(path, (age, age))
    room = 2 * min(sizes) + sizes[0] + sizes[1]
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1, limit_bytes=room)
    for index in (0, 1):
        cache.open(index)
        cache.keep_only([])
    cache.close()
    own = {f"{corpus.manifest.shards[index].sha256}.tar" for index in (0, 1)}
    assert files(tmp_path) == own | {others[1].name, others[2].name}


@pytest.mark.parametrize("is_disk_full", [False, True], ids=["limit", "full disk"])
def test_files_that_the_cache_has_not_made_stay(
    corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disk_full: bool
) -> None:
    """The user's own files in data.cache_dir are neither deleted nor counted, whatever their names are."""
    first = corpus.manifest.shards[0]
    names = ["thesis-backup.tar", f"{'a' * 64}.tar", f"{first.sha256}.tar", f"my-{first.sha256}.tar", "b.unverified"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine" * 1_000_000)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "folder.tar").mkdir()
    data = DataConfig(
        corpus="s3://b/c", cache_limit_gb=2.5 * max(entry.bytes for entry in corpus.manifest.shards) / 1e9
    )
    if is_disk_full:
        usage = namedtuple("usage", "total used free")
        full_if = lambda path: usage(0, 0, 0 if len(list(Path(path).glob("*.tar"))) > 2 else 10**12)  # noqa: E731
        monkeypatch.setattr(shutil, "disk_usage", full_if)
    cache = open_cache(Corpora.of(remote, corpus.manifest), data, tmp_path)
    for index in range(len(corpus.manifest.shards)):
        cache.open(index)
        cache.keep_only([])
    cache.close()
    assert [(tmp_path / name).read_bytes() for name in names] == [b"mine" * 1_000_000] * len(names)
    assert (tmp_path / "folder.tar").is_dir()
    assert len(remote.fetched) == len(corpus.manifest.shards)
    cached = [path for path in tmp_path.rglob("*.tar") if path.is_file() and path.name not in names]
    assert 1 <= len(cached) <= 3


def test_a_cache_deletes_only_names_of_its_own(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    """Also inside the folder of the shards, a file of another name than the cache gives stays."""
    sha256 = corpus.manifest.shards[0].sha256
    names = ["thesis-backup.tar", f"my-{sha256}.tar", f"{sha256}.tar.txt", f".{sha256}.tar"]
    names += [f".{sha256}.unverified", f"{sha256}.unverified.12345678.tmp", f".{sha256}.unverified.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / f"{'b' * 64}.tar").mkdir()
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1, limit_bytes=1)
    for index in range(3):
        cache.open(index)
        cache.keep_only([])
    cache.close()
    assert {*names, f"{'b' * 64}.tar"} <= files(tmp_path)


def test_shards_in_use_are_never_evicted(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    """The limit is exceeded instead, for shards in use of this cache and of another one."""
    one = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1, limit_bytes=1)
    other = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1, limit_bytes=1)
    held = [one.open(0), other.open(1)]
    for index in (2, 3, 4):
        one.open(index)
        one.keep_only([0])
    names = [f"{entry.sha256}.tar" for entry in corpus.manifest.shards]
    assert {names[0], names[1]} <= files(tmp_path)
    assert names[2] not in files(tmp_path)
    assert [len(shard.rows(np.array([0]))) for shard in held] == [1, 1]
    one.close()
    other.close()


def read_at_random(corpus: Any, folder: Path, limit_bytes: int, seed: int, fetched: Any) -> None:
    """Open shards in random order, two at a time, and compare every row; add the number of fetches to `fetched`."""
    remote, order = Remote(Path(corpus.store.url), 0.0002), random.Random(seed)
    cache = ShardCache(Corpora.of(remote, corpus.manifest), folder, fetch_threads=2, limit_bytes=limit_bytes)
    first_rows = np.cumsum([0, *(entry.rows for entry in corpus.manifest.shards)])
    for _ in range(60):
        indices = order.sample(range(len(corpus.manifest.shards)), 2)
        cache.prefetch(indices)
        for index in indices:
            shard = cache.open(index)
            rows = corpus.rows[first_rows[index] : first_rows[index + 1]]
            assert (shard.rows(np.arange(shard.num_rows)) == rows).all()
        cache.keep_only(indices[:1])
    cache.close()
    with fetched.get_lock():
        fetched.value += len(remote.fetched)


def test_jobs_that_evict_each_others_shards_all_read_correct_rows(
    build_corpus: Callable[..., Any], corpus: Any, tmp_path: Path
) -> None:
    """Two processes on one corpus and one on another share a folder whose limit is smaller than both corpora."""
    other = build_corpus(open_store(str(tmp_path / "other")), [30, 12, 25, 8, 40])
    folder, num_shards = tmp_path / "cache", 7 + 5
    limit_bytes = 4 * max(entry.bytes for entry in (*corpus.manifest.shards, *other.manifest.shards))
    fetched = FORK.Value("i", 0)
    jobs = [(corpus, 1), (corpus, 2), (other, 3)]
    processes = [FORK.Process(target=read_at_random, args=(c, folder, limit_bytes, n, fetched)) for c, n in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert fetched.value > 3 * num_shards  # otherwise no shard was evicted while it was still needed
    assert files(folder) <= whole(corpus) | whole(other)
    for path in folder.glob("*.tar"):
        assert path.stem == file_sha256(path)
    # The limit may be exceeded by shards in use: for each job, at most two open ones and two that are being fetched.
    assert len(list(folder.glob("*.tar"))) < num_shards


def test_rows_are_correct_while_another_thread_deletes_every_cached_file(
    corpus: Any, remote: Remote, tmp_path: Path
) -> None:
    stop = threading.Event()

    def delete_repeatedly() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("*.tar"):
                path.unlink(missing_ok=True)
            time.sleep(0.002)

    thread = threading.Thread(target=delete_repeatedly)
    thread.start()
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=2)
    try:
        for _ in range(10):
            assert (rows_through(cache) == corpus.rows).all()
            cache.keep_only([])
    finally:
        stop.set()
        thread.join()
        cache.close()


def test_full_disk_fails_before_the_fetch_naming_the_bytes_and_the_setting(
    corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: Any
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 512))
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1)
    with pytest.raises(StoreAway, match=r"disk full: 512 bytes free, \d+ needed .*set data.cache_dir"):
        cache.open(0)
    cache.close()
    assert remote.fetched == []


def test_a_download_reserves_its_room_on_a_nearly_full_disk(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a download runs, another that finds the same free bytes does not begin; a killed one reserves nothing."""
    first, second, third = corpus.manifest.shards[:3]
    monkeypatch.setattr(node_cache, "_SPARE_BYTES", 0)
    free_bytes = first.bytes + second.bytes - 1
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free_bytes))
    store = Late(Path(corpus.store.url), first.name)
    cache = NodeCache(tmp_path)
    download = threading.Thread(target=cache.ensure, args=(StoredShard(store, first),), kwargs={"verify": False})
    download.start()
    while f"{first.sha256}.unverified" not in files(tmp_path):
        time.sleep(0.001)
    with pytest.raises(StoreAway, match=f"disk full: {free_bytes - first.bytes} bytes free, {second.bytes} needed"):
        cache.ensure(StoredShard(store, second), verify=False)
    store.may_arrive.set()
    download.join()
    with (tmp_path / f"{third.sha256}.unverified").open("wb") as left_over:
        left_over.truncate(free_bytes)
    cache.ensure(StoredShard(store, second), verify=False)
    assert files(tmp_path) == {f"{first.sha256}.tar", f"{second.sha256}.tar"}


def test_a_shard_whose_prefetch_failed_is_tried_again_when_it_is_needed(
    corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full while the shards of the window before were open."""
    free_bytes = [0]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free_bytes[0]))
    with closing(ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1)) as cache:
        cache.prefetch([0, 1])
        failed = cache._shards[1]
        assert isinstance(failed, Future)
        assert isinstance(failed.exception(timeout=30), StoreAway)
        free_bytes[0] = 10**12
        assert len(cache.open(1).rows(np.array([0]))) == 1
        assert remote.fetched == [corpus.manifest.shards[1].name]
        free_bytes[0] = 0
        with pytest.raises(StoreAway, match="disk full"):
            cache.open(2)


def test_opening_a_shard_waits_for_room_on_the_disk(
    corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = [0]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free_bytes[0]))

    def make_room(reason: str) -> None:
        assert not reason or "disk full: 0 bytes free" in reason
        free_bytes[0] = 10**12

    remote.patience = Patience(600.0, note=lambda line: None)
    remote.patience.reporter.on_wait = make_room
    with closing(ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1)) as cache:
        assert len(cache.open(1).rows(np.array([0]))) == 1
    assert remote.fetched == [corpus.manifest.shards[1].name]


def test_a_shard_that_others_delete_again_and_again_is_not_fetched_for_ever(
    corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_and_open(path: Path, *arguments: Any, **keys: Any) -> Shard | None:
        path.unlink()
        return open_if_listed(path, *arguments, **keys)

    open_if_listed = shard_cache._open_if_listed
    monkeypatch.setattr(shard_cache, "_open_if_listed", delete_and_open)
    with (
        closing(ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1)) as cache,
        pytest.raises(StoreAway, match=r"deleted 5 times in a row before it could be opened, .*cache_limit_gb"),
    ):
        cache.open(0)
    assert remote.fetched == [corpus.manifest.shards[0].name] * 5


def test_a_process_may_open_the_shards_of_two_windows(corpus: Any, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, before[1]))
        for window_shards, least_files in ((64, 640), (120, 752)):
            data = DataConfig(corpus="c", shuffle_window_shards=window_shards)
            open_cache(corpus.corpora, data, tmp_path).close()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(700, least_files), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_shard_that_is_refused_is_closed(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    """Its map and its lock, which keeps the cache from deleting it, end before the error is handled."""
    entries = list(corpus.manifest.shards)
    entries[1] = entries[1].model_copy(update={"rows": 6})
    manifest = corpus.manifest.model_copy(update={"shards": tuple(entries)})
    cache = ShardCache(Corpora.of(remote, manifest), tmp_path)
    path = tmp_path / f"{entries[1].sha256}.tar"
    with pytest.raises(ManifestMismatch, match=r"5 rows, but corpus.json lists 6") as refused, closing(cache):
        cache.open(1)
    assert refused.value  # as long as the error lives, its traceback keeps the shard from being collected
    with path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ManifestMismatch, match="holds uint16") as other_kind:
            Shard(path, corpus.manifest.seq_len + 1, corpus.manifest.numpy_dtype)
        assert str(path) not in Path("/proc/self/maps").read_text()
    assert other_kind.value


def test_a_full_disk_evicts_old_shards_first(corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: Any) -> None:
    """An old shard of another run is deleted before the full disk is reported as an error."""
    fetch_everything(corpus, tmp_path)
    old = tmp_path / f"{'f' * 64}.tar"
    old.write_bytes(b"x" * 100_000)
    usage = namedtuple("usage", "total used free")
    gone = f"{corpus.manifest.shards[0].sha256}.tar"
    (tmp_path / gone).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0 if old.exists() else 10**12))
    os.utime(old, (0, 0))
    cache = ShardCache(Corpora.of(remote, corpus.manifest), tmp_path, fetch_threads=1)
    cache.open(0)
    cache.close()
    assert files(tmp_path) == whole(corpus)


def test_a_file_system_without_locks_is_refused(
    corpus: Any, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreError, match=r"no file locks in this folder; set data.cache_dir to a local disk"):
        NodeCache(tmp_path).ensure(StoredShard(remote, corpus.manifest.shards[0]), verify=True)


def test_unwritable_cache_folder_is_refused(corpus: Any, remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="not a folder; choose another path"):
        NodeCache(tmp_path / "file").ensure(StoredShard(remote, corpus.manifest.shards[0]), verify=True)
