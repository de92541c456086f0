"""Saving: equal bytes in every target, buffers, errors, and a target that cannot be written."""

from __future__ import annotations

import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import checkpoints as small
from support.checkpoints import committed, folder_name, verify

from electra_dist.checkpoint.chosen_weights import assemble
from electra_dist.checkpoint.commit import Fenced
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CheckpointConfig
from electra_dist.errors import StorageLost, StoreAway, StoreError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore, open_store
from electra_dist.store.patience import Patience


def test_every_target_gets_the_same_bytes(two_targets: list[Store], tmp_path: Path) -> None:
    state = small.save(two_targets, 10)
    first, second = ({key: target.read(key) for key in target.list()} for target in two_targets)
    assert first == second and len(first) == state.world_size + 1


def test_saving_to_a_target_that_cannot_be_written_raises_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        small.save([open_store(str(tmp_path / "file"))], 10)


def test_save_stores_the_values_at_the_time_of_the_call_and_reuses_the_reserved_buffer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer = CheckpointWriter([store], 0, small.KEEP_ALL)
    values = small.content(1)
    fragments = small.share(values, 0, 1)
    writer.reserve(fragments)
    buffer = writer._buffer
    for step in (1, 2):
        for name, kinds in small.content(step).items():
            for kind, tensor in kinds.items():
                values[name][kind].copy_(tensor)
        writer.save(small.state_at(step, world_size=1), fragments)
    for kinds in values.values():  # training changes the values while they are written
        for tensor in kinds.values():
            tensor.zero_()
    assert writer._buffer is buffer
    writer.close()
    assert writer._buffer is None
    for step in (1, 2):
        assert verify(store, folder_name(step, 1))[1] == []
    weights = assemble([store])[1]
    assert all((weights[name].view(-1) == small.content(2)[name]["master"]).all() for name in small.SHAPES)


class AwayStore(LocalStore):
    """Folder that refuses every write while it is away."""

    is_away = True

    def _wait(self) -> None:
        def check() -> None:
            if self.is_away:
                raise StoreAway(f"{self.url}: disk full; free space there")

        self.patience.call(check)

    def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        self._wait()
        super().write_pieces(key, pieces)

    def write_new(self, key: str, data: bytes) -> bool:
        self._wait()
        return super().write_new(key, data)


def begin_save(targets: list[Store]) -> CheckpointWriter:
    """Begin to save a checkpoint of one rank after step 10, and return the writer."""
    writer = CheckpointWriter(targets, 0, small.KEEP_ALL)
    writer.save(small.state_at(10, world_size=1), small.share(small.content(10), 0, 1))
    return writer


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most 30 s."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("order", [1, -1])
def test_a_target_that_is_away_holds_up_no_other_and_gets_the_checkpoint_when_it_is_back(
    tmp_path: Path, order: int
) -> None:
    patience = Patience(600.0, lambda line: None)
    away, other = AwayStore(tmp_path / "away", patience), LocalStore(tmp_path / "other", patience)
    commits: list[int] = []
    writer = begin_save([away, other][::order])
    writer.on_commit = lambda state, timing, seconds: commits.append(state.step)
    wait_until(lambda: bool(committed(other)))
    assert verify(other, folder_name(10, 1))[1] == []
    wait_until(lambda: "disk full" in patience.reporter.reason)
    assert commits == [] and not committed(away)
    away.is_away = False
    writer.close()
    assert commits == [10] and verify(away, folder_name(10, 1))[1] == []
    assert {key: away.read(key) for key in away.list()} == {key: other.read(key) for key in other.list()}


def test_a_target_that_stays_away_ends_the_save_with_its_first_error(tmp_path: Path) -> None:
    away = AwayStore(tmp_path / "away", Patience(0.5, lambda line: None))
    other = LocalStore(tmp_path / "other")
    writer = begin_save([away, other])
    wait_until(lambda: writer._save is not None and writer._save.error is not None)
    with pytest.raises(StorageLost, match="away: disk full; free space there; storage was waited for"):
        writer.close()
    assert verify(other, folder_name(10, 1))[1] == [] and not committed(away)


def test_a_commit_that_failed_half_way_is_finished_and_not_taken_for_another_process(tmp_path: Path) -> None:
    """The manifest is created, then the disk does not respond any more, as in a crash of its server."""

    class HalfAway(LocalStore):
        num_failures = 2

        def write_new(self, key: str, data: bytes) -> bool:
            def attempt() -> bool:
                is_created = super(HalfAway, self).write_new(key, data)
                if self.num_failures:
                    self.num_failures -= 1
                    raise StoreAway(f"{self.url}: input/output error")
                return is_created

            return self.patience.call(attempt)

    target = HalfAway(tmp_path / "target", Patience(600.0, lambda line: None))
    begin_save([target]).close()
    assert verify(target, folder_name(10, 1))[1] == []
    assert target.num_failures == 0


def test_nothing_is_committed_before_the_metrics_are_on_the_disk(tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "target")
    patience = Patience(600.0, lambda line: None)
    can_sync = threading.Event()

    def sync() -> None:
        if not can_sync.is_set():
            raise StoreAway("metrics.jsonl: disk full")

    writer = CheckpointWriter([target], 0, small.KEEP_ALL)
    writer.before_commit = lambda: patience.call(sync)
    writer.save(small.state_at(10, world_size=1), small.share(small.content(10), 0, 1))
    wait_until(lambda: "metrics.jsonl" in patience.reporter.reason)
    assert not committed(target)
    can_sync.set()
    writer.close()
    assert committed(target)


def test_the_metrics_are_waited_for_once_and_not_for_each_target(tmp_path: Path) -> None:
    calls: list[int] = []

    def refuse() -> None:
        calls.append(1)
        raise StorageLost("metrics.jsonl: disk full")

    writer = CheckpointWriter([LocalStore(tmp_path / name) for name in ("a", "b")], 0, small.KEEP_ALL)
    writer.before_commit = refuse
    writer.save(small.state_at(10, world_size=1), small.share(small.content(10), 0, 1))
    with pytest.raises(StorageLost, match="disk full"):
        writer.close()
    assert calls == [1]


def test_a_fence_is_raised_although_another_target_fails_too(tmp_path: Path) -> None:
    class Failing(LocalStore):
        def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
            raise StoreError("access refused")

    fenced = LocalStore(tmp_path / "b")
    fenced.write("attempts/0002.json", b"")
    with pytest.raises(Fenced, match="start 2 has replaced it"):
        begin_save([Failing(tmp_path / "a"), fenced]).close()


def test_a_save_that_makes_progress_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is reported by the time since the last piece of a file was taken, so that a slow save is no hang."""
    now = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr("electra_dist.checkpoint.writer.time", clock)
    monkeypatch.setattr("electra_dist.checkpoint.writer._WAIT_SLICE_S", 0.01)
    silences: list[float] = []
    num_slow = 0

    class Slow(LocalStore):
        def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
            nonlocal now, num_slow
            for _ in pieces:
                wait_until(lambda: silences[-1:] == [0.0])
                now += 100.0
                wait_until(lambda: silences[-1:] == [100.0])
                num_slow += 1
            super().write_pieces(key, pieces)

    writer = begin_save([Slow(tmp_path / "target")])
    writer.on_wait = silences.append
    writer.close()
    assert num_slow > 2


def test_the_space_for_the_next_checkpoint_is_compared_with_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Store] = [LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")]
    writer = CheckpointWriter(targets, 0, small.KEEP_ALL)
    fragments = small.share(small.content(1), 0, 1)
    writer.reserve(fragments)
    own_bytes = 12 * sum(fragment.numel for fragment in fragments)
    real = os.statvfs(tmp_path)

    def with_free(num_bytes: int) -> None:
        fields = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
        disk = types.SimpleNamespace(**{**fields, "f_bavail": num_bytes, "f_frsize": 1})
        monkeypatch.setattr(os, "statvfs", lambda path: disk)

    with_free(2 * 3 * own_bytes)  # both targets are on this disk, and three ranks write to each
    assert writer.space_shortage(num_ranks=3) == ""
    with_free(2 * 3 * own_bytes - 1)
    assert f"the disk of {tmp_path / 'a'} has" in writer.space_shortage(num_ranks=3)


def test_a_failed_deletion_does_not_hide_a_failed_save(tmp_path: Path) -> None:
    """The deletion after the second save fails while the third save has failed already; both errors are raised."""
    may_fail = threading.Event()

    class Failing(LocalStore):
        """Store that refuses to delete manifests, once it may, and all files of step 3."""

        def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
            if "00000003-" in key:
                raise StoreError("the save failed")
            super().write_pieces(key, pieces)

        def delete(self, key: str) -> None:
            assert may_fail.wait(60)
            raise StoreError("the deletion failed")

    writer = CheckpointWriter([Failing(tmp_path / "target")], 0, CheckpointConfig(keep_last=1))
    for step in (1, 2, 3):
        writer.save(small.state_at(step, world_size=1), small.share(small.content(step), 0, 1))
    wait_until(lambda: writer._save is not None and writer._save.error is not None)
    may_fail.set()
    assert writer._deletion is not None
    writer._deletion.join()
    with pytest.raises(StoreError, match="the save failed"):
        writer.wait()
    with pytest.raises(StoreError, match="the deletion failed"):
        writer.close()


def test_an_error_is_raised_by_one_close_only(tmp_path: Path) -> None:
    """The second `close`, on the way out of an exception, must not replace that one by the error of the deletion."""

    class Failing(LocalStore):
        """Store that refuses to delete manifests, and all files of step 3."""

        def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
            if "00000003-" in key:
                raise StoreError("the save failed")
            super().write_pieces(key, pieces)

        def delete(self, key: str) -> None:
            raise StoreError("the deletion failed")

    writer = CheckpointWriter([Failing(tmp_path / "target")], 0, CheckpointConfig(keep_last=1))
    for step in (1, 2):
        writer.save(small.state_at(step, world_size=1), small.share(small.content(step), 0, 1))
        assert writer._save is not None
        writer._save.join()
    assert writer._deletion is not None
    writer._deletion.join()
    writer._deletion.error, error = None, writer._deletion.error
    writer.save(small.state_at(3, world_size=1), small.share(small.content(3), 0, 1))
    writer._deletion.error = error
    with pytest.raises(StoreError, match="the save failed"):
        writer.close()
    writer.close()


def test_close_frees_the_copy_of_the_state_although_somebody_keeps_the_writer(tmp_path: Path) -> None:
    """After a rollback another writer reserves as much, while the old one still waits for the garbage collector."""
    writer = CheckpointWriter([LocalStore(tmp_path / "target")], 0, CheckpointConfig())
    writer.save(small.state_at(1, world_size=1), small.share(small.content(1), 0, 1))
    buffer = weakref.ref(writer._buffer)
    writer.close()
    assert buffer() is None
