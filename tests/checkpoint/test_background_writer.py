"""Saving: equal bytes in every target, staging files, buffers, and a target that cannot be written."""

from __future__ import annotations

import os
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as small
from support.checkpoints import committed, folder_name, verify

from electra_dist.checkpoint.background_writer import CheckpointWriter
from electra_dist.checkpoint.chosen_weights import assemble
from electra_dist.errors import StorageLost, StoreAway, StoreError
from electra_dist.store.interface import Store
from electra_dist.store.local_store import LocalStore
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Patience


def test_staged_files_of_dead_attempts_are_removed_and_those_of_the_current_attempt_are_kept(
    open_s3: Callable[[str], Store], tmp_path: Path
) -> None:
    target, staging = open_s3("run"), tmp_path / "staging"
    for attempt in (1, 2):
        (staging / folder_name(10, attempt)).mkdir(parents=True)
        (staging / folder_name(10, attempt) / small.file_name(3)).write_bytes(b"x")
        (staging / folder_name(10, attempt) / f".{small.file_name(4)}.0a1b2c3d.tmp").write_bytes(b"x")
    CheckpointWriter([target], staging, 0, 2, small.KEEP_ALL)
    assert [path.name for path in staging.iterdir()] == [folder_name(10, 2)]
    small.save([target], staging, 20, attempt=2)
    assert [path.name for path in staging.iterdir()] == [
        folder_name(10, 2)
    ]  # an uploaded file is removed from staging


def test_every_target_gets_the_same_bytes(two_targets: list[Store], tmp_path: Path) -> None:
    state = small.save(two_targets, tmp_path / "staging", 10)
    first, second = ({key: target.read(key) for key in target.list()} for target in two_targets)
    assert first == second and len(first) == state.world_size + 1


def test_saving_to_a_target_that_cannot_be_written_raises_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        small.save([open_store(str(tmp_path / "file"))], tmp_path / "staging", 10)


def test_save_stores_the_values_at_the_time_of_the_call_and_reuses_the_reserved_buffer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer = CheckpointWriter([store], tmp_path / "staging", 0, 1, small.KEEP_ALL)
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

    def _refuse_if_away(self) -> None:
        if self.is_away:
            raise StoreAway(f"{self.url}: disk full; free space there")

    def upload(self, path: Path, key: str) -> None:
        self._refuse_if_away()
        super().upload(path, key)

    def write(self, key: str, data: bytes) -> None:
        self._refuse_if_away()
        super().write(key, data)

    def write_new(self, key: str, data: bytes) -> bool:
        self._refuse_if_away()
        return super().write_new(key, data)


def begin_save(targets: list[Store], staging: Path, patience: Patience) -> CheckpointWriter:
    """Begin to save a checkpoint of one rank after step 10, and return the writer."""
    writer = CheckpointWriter(targets, staging, 0, 1, small.KEEP_ALL, patience=patience)
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
    away, other = AwayStore(tmp_path / "away"), LocalStore(tmp_path / "other")
    patience = Patience(600.0, lambda line: None)
    commits: list[int] = []
    writer = begin_save([away, other][::order], tmp_path / "staging", patience)
    writer.on_commit = lambda state, timing, seconds: commits.append(state.step)
    wait_until(lambda: bool(committed(other)))
    assert verify(other, folder_name(10, 1))[1] == []
    wait_until(lambda: "disk full" in patience.reason)
    assert commits == [] and not committed(away)
    away.is_away = False
    writer.close()
    assert commits == [10] and verify(away, folder_name(10, 1))[1] == []
    assert {key: away.read(key) for key in away.list()} == {key: other.read(key) for key in other.list()}


def test_a_target_that_stays_away_ends_the_save_with_its_first_error(tmp_path: Path) -> None:
    away, other = AwayStore(tmp_path / "away"), LocalStore(tmp_path / "other")
    writer = begin_save([away, other], tmp_path / "staging", Patience(0.5, lambda line: None))
    wait_until(lambda: writer.has_failed)
    with pytest.raises(StorageLost, match="away: disk full; free space there; storage was waited for"):
        writer.close()
    assert verify(other, folder_name(10, 1))[1] == [] and not committed(away)


def test_a_commit_that_failed_half_way_is_finished_and_not_taken_for_another_process(tmp_path: Path) -> None:
    """The manifest is created, then the disk does not respond any more, as in a crash of its server."""

    class HalfAway(LocalStore):
        num_failures = 2

        def write_new(self, key: str, data: bytes) -> bool:
            is_created = super().write_new(key, data)
            if self.num_failures:
                self.num_failures -= 1
                raise StoreAway(f"{self.url}: input/output error")
            return is_created

    target = HalfAway(tmp_path / "target")
    begin_save([target], tmp_path / "staging", Patience(600.0, lambda line: None)).close()
    assert verify(target, folder_name(10, 1))[1] == []
    assert target.num_failures == 0


def test_nothing_is_committed_before_the_metrics_are_on_the_disk(tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "target")
    patience = Patience(600.0, lambda line: None)
    can_sync = threading.Event()

    def sync() -> None:
        if not can_sync.is_set():
            raise StoreAway("metrics.jsonl: disk full")

    writer = CheckpointWriter([target], tmp_path / "staging", 0, 1, small.KEEP_ALL, patience=patience)
    writer.before_commit = sync
    writer.save(small.state_at(10, world_size=1), small.share(small.content(10), 0, 1))
    wait_until(lambda: "metrics.jsonl" in patience.reason)
    assert not committed(target)
    can_sync.set()
    writer.close()
    assert committed(target)


def test_the_space_for_the_next_checkpoint_is_compared_with_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Store] = [LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")]
    writer = CheckpointWriter(targets, tmp_path / "staging", 0, 1, small.KEEP_ALL)
    fragments = small.share(small.content(1), 0, 1)
    writer.reserve(fragments)
    own_bytes = 12 * sum(fragment.numel for fragment in fragments)
    real = os.statvfs(tmp_path)

    def with_free(num_bytes: int) -> None:
        fields = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
        disk = types.SimpleNamespace(**{**fields, "f_bavail": num_bytes, "f_frsize": 1})
        monkeypatch.setattr(os, "statvfs", lambda path: disk)

    with_free(2 * 3 * own_bytes)  # both targets are on this disk, and three ranks write to each
    assert writer.space_shortage(num_ranks=3, ranks_on_node=1) == ""
    with_free(2 * 3 * own_bytes - 1)
    assert f"the disk of {tmp_path / 'a'} has" in writer.space_shortage(num_ranks=3, ranks_on_node=1)
