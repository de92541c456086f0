"""Attempts, fencing, removal of unfinished files, and retention, on a local folder and on S3."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as small
from support import s3_server
from support.checkpoints import checkpoint_in, committed, folder_name, verify

from electra_dist.checkpoint import commit as commit_module
from electra_dist.checkpoint.commit import Fenced, begin_attempt, leftovers, newest_attempt, retain
from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.checkpoint.stored_copies import checkpoints
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CheckpointConfig
from electra_dist.errors import UserError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore, open_store
from electra_dist.store.patience import Patience

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}


def test_attempt_numbers_increase_over_all_targets(two_targets: list[Store]) -> None:
    assert begin_attempt(two_targets, RUN) == 1
    assert begin_attempt(two_targets[1:], RUN) == 2
    assert begin_attempt(two_targets, RUN) == 3
    assert begin_attempt(two_targets[:1], RUN) == 4


def test_a_start_waits_for_all_targets_at_once(tmp_path: Path) -> None:
    """One after another, two targets that are away were waited for twice as long."""
    both_are_listed = threading.Barrier(2, timeout=30.0)

    class Away(LocalStore):
        is_first = True

        def list(self, prefix: str = "") -> list[str]:
            if self.is_first:
                self.is_first = False
                both_are_listed.wait()
            return super().list(prefix)

    targets: list[Store] = [Away(tmp_path / name) for name in ("a", "b")]
    assert begin_attempt(targets, RUN) == 1
    for target in targets:
        target.is_first = True  # type: ignore[attr-defined]
    assert checkpoints(targets) == []


def test_concurrent_starts_get_different_attempt_numbers(target: Store) -> None:
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(begin_attempt([target], RUN))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 8


def test_files_of_others_among_the_attempts_are_passed_over(target: Store) -> None:
    begin_attempt([target], RUN)
    for name in (".DS_Store", "0009 (copy).json", "0009.json~", ".nfs0001", "x.json"):
        target.write(f"attempts/{name}", b"not json")
    assert begin_attempt([target], RUN) == 2


def test_a_store_that_is_named_twice_is_refused_in_one_line(tmp_path: Path) -> None:
    """Here nothing has compared the targets before; a start took numbers for ever."""
    folder = LocalStore(tmp_path / "target")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(UserError, match="name each place once") as caught:
        begin_attempt([folder, LocalStore(tmp_path / "link")], RUN)
    assert "\n" not in str(caught.value)
    (tmp_path / "other" / "attempts" / "0001.json").mkdir(parents=True)  # no file, so no listing shows it
    with pytest.raises(UserError, match="move away what is no file of a start"):
        begin_attempt([LocalStore(tmp_path / "other")], RUN)


class ReplacingStore(LocalStore):
    """A store whose service ignores that a file must be created only if there is none."""

    def write_new(self, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True


def test_a_service_that_replaces_files_instead_of_refusing_is_refused(tmp_path: Path) -> None:
    target = ReplacingStore(tmp_path)
    with pytest.raises(UserError, match="If-None-Match") as caught:
        begin_attempt([target], RUN)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="If-None-Match"):
        begin_attempt([LocalStore(tmp_path / "other"), target], RUN)


def test_of_two_runs_that_start_at_once_in_one_target_one_is_refused(tmp_path: Path) -> None:
    other = {**RUN, "identity_sha256": "1" * 64}

    class RacedStore(LocalStore):
        """A store in which another run takes the first number just before this one does."""

        def write_new(self, key: str, data: bytes) -> bool:
            if newest_attempt(LocalStore(tmp_path)) == 0:
                begin_attempt([LocalStore(tmp_path)], other)
            return super().write_new(key, data)

    with pytest.raises(UserError, match="checkpoints of another run"):
        begin_attempt([RacedStore(tmp_path)], RUN)
    assert begin_attempt([LocalStore(tmp_path)], other) == 2


def test_a_start_deletes_empty_folders_and_unfinished_files_of_earlier_starts(tmp_path: Path) -> None:
    target = LocalStore(tmp_path)
    begin_attempt([target], RUN)
    old, own = tmp_path / folder_name(10, 1), tmp_path / folder_name(10, 2)
    unfinished = [tmp_path / "attempts" / f".{number:04d}.json.0a1b2c3d.tmp" for number in (1, 3)]
    for folder in (old, own):
        folder.mkdir()
    for file in unfinished:
        file.touch()
    assert begin_attempt([target], RUN) == 2
    assert not old.exists() and own.exists()  # a process of start 2 may be about to write there
    assert [file.exists() for file in unfinished] == [False, True]


def test_a_replaced_attempt_ends_like_a_mistake_of_the_user_with_one_line() -> None:
    assert issubclass(Fenced, UserError)  # so that it is neither a traceback nor restarted into a fight


def test_target_of_another_run_is_refused_and_left_unchanged(target: Store, tmp_path: Path) -> None:
    begin_attempt([target], RUN)
    small.save([target], 10)
    before = target.list()
    with pytest.raises(UserError, match="checkpoints of another run"):
        begin_attempt([target], {**RUN, "corpus_fingerprint": "other"})
    assert target.list() == before


def test_replaced_attempt_cannot_commit_and_deletes_nothing(target: Store, tmp_path: Path) -> None:
    begin_attempt([target], RUN)
    small.save([target], 10)
    begin_attempt([target], RUN)
    with pytest.raises(Fenced, match="because start 2 has replaced it"):
        small.save([target], 20, policy=CheckpointConfig(keep_last=1))
    assert committed(target) == [(10, 1, folder_name(10, 1))]
    small.save([target], 20, attempt=2)
    assert [place[:2] for place in committed(target)] == [(10, 1), (20, 2)]


def test_attempt_that_is_replaced_while_it_commits_deletes_no_checkpoint(
    target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt begins just before the manifest is created, and removes the files that the manifest lists."""
    begin_attempt([target], RUN)
    small.save([target], 10)
    create, successors = type(target).write_new, list[int]()

    def begin_first(self: Store, key: str, data: bytes) -> bool:
        if key.endswith(MANIFEST):
            successors.append(begin_attempt([target], RUN))
        return create(self, key, data)

    monkeypatch.setattr(type(target), "write_new", begin_first)
    with pytest.raises(Fenced, match="because start 2 has replaced it"):
        small.save([target], 20, policy=CheckpointConfig(keep_last=1))
    assert successors == [2]
    assert verify(target, folder_name(20, 1))[1] != []  # its files were removed; the next load sets it aside
    assert verify(target, folder_name(10, 1))[1] == []


def test_start_removes_unfinished_files_of_dead_attempts_and_nothing_else(target: Store, tmp_path: Path) -> None:
    begin_attempt([target], RUN)
    for step in (10, 20, 30):
        small.save([target], step)
    checkpoint_in(target, folder_name(20, 1)).set_aside("for the test")
    good = target.list("step-")
    dead = f"{folder_name(40, 1)}/{small.file_name(0)}"
    own = f"{folder_name(50, 2)}/{small.file_name(0)}"
    for key in (dead, own):
        target.write(key, b"x")
    assert leftovers(target, 2) == [dead]
    assert begin_attempt([target], RUN) == 2
    assert sorted(target.list("step-")) == sorted([*good, own])


def test_unfinished_local_write_of_a_dead_attempt_is_removed(tmp_path: Path) -> None:
    target = open_store(str(tmp_path))
    begin_attempt([target], RUN)
    unfinished = tmp_path / folder_name(10, 1) / ".manifest.json.12ab34cd.tmp"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    begin_attempt([target], RUN)
    assert not unfinished.parent.exists()


def test_unfinished_upload_of_a_dead_attempt_is_aborted(
    open_s3: Callable[[str], Store], s3: s3_server.S3Server
) -> None:
    target = open_s3("run")
    client, bucket = s3_server.client(*s3), target.url.split("/")[2]
    for folder in (folder_name(10, 1), folder_name(10, 2)):
        client.create_multipart_upload(Bucket=bucket, Key=f"run/{folder}/{small.file_name(0)}")
    begin_attempt([target], RUN)
    assert begin_attempt([target], RUN) == 2
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == [f"run/{folder_name(10, 2)}/{small.file_name(0)}"]


def test_commit_without_the_file_of_a_rank_fails_naming_the_rank(
    target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "FILES_TIMEOUT_S", 0.2)
    monkeypatch.setattr(target, "patience", Patience(0.0))  # which is waited for, too
    writer = CheckpointWriter([target], 0, small.KEEP_ALL)
    writer.save(small.state_at(10), small.share(small.content(10), 0, 2))
    with pytest.raises(TimeoutError, match="the file of rank 1 was not written"):
        writer.close()
    assert committed(target) == []


def test_rank_0_waits_for_files_for_as_long_as_other_ranks_wait_for_their_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def store_file_of(rank: int) -> CheckpointWriter:
        writer = CheckpointWriter([target], rank, small.KEEP_ALL)
        writer.save(small.state_at(10), small.share(small.content(10), rank, 2))
        return writer

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 500.0
        if now == 2500.0:  # FILES_TIMEOUT_S is over
            store_file_of(1).close()

    monkeypatch.setattr(commit_module, "time", types.SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    target = LocalStore(tmp_path, Patience(900.0))
    store_file_of(0).close()
    assert len(committed(target)) == 1


def test_retention_on_a_target_keeps_the_last_the_chosen_steps_and_the_best(target: Store, tmp_path: Path) -> None:
    policy = CheckpointConfig(keep_last=2, keep_every_steps=30, keep_steps=(40,), keep_best=1)
    losses = {10: 0.9, 20: 0.3, 30: 0.8, 40: 0.4, 50: 0.5, 60: 0.6, 70: 0.7, 80: None}
    for step, loss in losses.items():
        small.save([target], step, policy=policy, fields={"eval_loss": loss})
    assert [step for step, _, _ in committed(target)] == [20, 30, 40, 60, 70, 80]
    assert {key.partition("/")[0] for key in target.list("step-")} == {f for _, _, f in committed(target)}


@pytest.mark.parametrize(
    ("fields", "best"),
    [
        # The context AUC counts where there is one, whatever the loss of the discriminator is.
        ([{"eval_context_auc": 0.6, "eval_loss": 0.2}, {"eval_context_auc": 0.7, "eval_loss": 0.9}], 20),
        ([{"eval_loss": 5.0}, {"eval_loss": 6.0}], 10),
        ([{"eval_context_auc": math.nan, "eval_loss": 6.0}, {"eval_context_auc": math.nan, "eval_loss": 9.0}], 10),
    ],
)
def test_best_is_the_context_auc_or_else_the_own_loss(
    tmp_path: Path, fields: list[dict[str, float]], best: int
) -> None:
    store = open_store(str(tmp_path))
    policy = CheckpointConfig(keep_last=1, keep_best=1)
    for number, scores in enumerate([*fields, {}], start=1):
        small.save([store], 10 * number, policy=policy, fields=scores)
    assert [step for step, _, _ in committed(store)] == [best, 30]


def test_retention_deletes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    for step in (1, 2):
        small.save([store], step)
    deleted: list[str] = []
    delete = LocalStore.delete
    monkeypatch.setattr(LocalStore, "delete", lambda self, key: (deleted.append(key), delete(self, key))[1])
    retain(store, CheckpointConfig(keep_last=1), 0, 1, {})
    assert deleted[0] == f"{folder_name(1, 1)}/{MANIFEST}" and len(deleted) == 3


def test_files_of_the_user_in_the_folders_of_checkpoints_stay(target: Store, tmp_path: Path) -> None:
    """Neither the deletion of old checkpoints nor that of unfinished ones takes a file that no save has written."""
    begin_attempt([target], RUN)
    for step in (10, 20):
        small.save([target], step)
    old, unfinished = folder_name(10, 1), folder_name(15, 1)
    mine = [
        f"{old}/notes.txt",
        f"{old}/{small.file_name(0)}.bak",
        f"{old}/rank-00000.safetensors",
        f"{unfinished}/thesis.md",
        "step-30/a.txt",
    ]
    for key in mine:
        target.write(key, b"mine")
    target.write(f"{unfinished}/{small.file_name(0)}", b"half")
    policy = CheckpointConfig(keep_last=1, keep_best=0, keep_every_steps=0)
    retain(target, policy, 0, 1, {})
    assert begin_attempt([target], RUN) == 2
    keys = target.list("step-")
    assert {key for key in keys if not key.startswith(folder_name(20, 1))} == set(mine)
    assert f"{folder_name(20, 1)}/manifest.json" in keys
