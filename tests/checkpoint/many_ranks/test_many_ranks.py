"""Check the requests of saves, restores and starts of 64 to 1,024 ranks, and that the checkpoints can be read.

A manifest of format 2 lists all tensors; one of format 3 holds how each parameter is divided between the files.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support import checkpoints as small
from support import many_ranks
from support.counting_store import CountingStore, Service

from electra_dist.checkpoint.background_writer import CheckpointWriter
from electra_dist.checkpoint.checkpoint_manifest import (
    FileEntry,
    Manifest,
    RunState,
    committed,
    folder_name,
    read_manifest,
)
from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.checkpoint.file_reader import fill, verify
from electra_dist.checkpoint.many_ranks import parameter_runs
from electra_dist.checkpoint.repair import repair
from electra_dist.checkpoint.restore_state import load_newest
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store
from electra_dist.store.local_store import LocalStore

SIZES = (64, 512, 1024)
FOLDER = folder_name(10, 1)


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `os.fsync` by nothing, because a test writes thousands of files and depends on none after a crash."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=["listed", "runs"])
def is_in_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether manifests are of format 3 in a test, which is made once with each format.

    Format 3 is used only if a list of the tensors would be long; the limit is set to 0 for the small checkpoints.
    """
    is_format_3: bool = request.param == "runs"
    if is_format_3:
        monkeypatch.setattr(parameter_runs, "_MOST_LISTED_TENSORS", 0)
    return is_format_3


def state_of(world_size: int, step: int = 10) -> RunState:
    """Return the state of a run at ZeRO stage 3, where a manifest of format 3 is possible."""
    return small.state_at(step, world_size=world_size, zero_stage=3)


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_of_a_save(world_size: int, tmp_path: Path, is_in_runs: bool) -> None:
    """The counts are those of the table in docs/cluster.md."""
    service = Service()
    begin_attempt([CountingStore(service)], many_ranks.RUN)
    old_names = [*(f"rank-{rank:05d}.safetensors" for rank in range(world_size)), "manifest.json"]
    for name in old_names:
        service.objects[f"{folder_name(5, 1)}/{name}"] = b"x"
    counts = many_ranks.save(service, tmp_path, state_of(world_size))
    store = CountingStore(service)
    assert committed(store) == [(10, 1, FOLDER)]
    assert read_manifest(store, FOLDER).format == (3 if is_in_runs else 2)
    assert len(store.list()) == world_size + 2  # files, manifest and the number of the start: no entry is left
    groups = {64: 8, 512: 23, 1024: 32}[world_size]
    assert counts.member.requests == {"PUT": 2}
    assert counts.leader is not None
    # Per leader: its own file and entry, whether the group was merged before, the entries, and their deletion.
    assert counts.leader.requests == {"PUT": 3, "LIST": 1, "GET": 1 + groups, "DELETE": 1}
    # PUT: file, entry and manifest. LIST: the groups, and the starts before and after the commit. GET: merged entries.
    assert counts.commit.requests == {"PUT": 3, "LIST": 3, "GET": groups, "DELETE": 1}
    assert counts.commit.num_serial == 7 + -(-groups // 16)
    pages = -(-(2 * world_size + 2) // 1000) + -(-world_size // 1000)  # all checkpoints, then the old one
    # LIST: these pages, and the starts. DELETE: the manifest, and then pages of the old checkpoint's other files.
    assert counts.deletion.requests == {"LIST": pages + 1, "DELETE": 1 + -(-world_size // 1000)}


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_of_a_start_with_two_leftovers_of_every_rank(world_size: int) -> None:
    service = Service()
    begin_attempt([CountingStore(service)], many_ranks.RUN)
    for rank in range(world_size):
        for name in (f"rank-{rank:05d}.safetensors", f"group-00000/rank-{rank:05d}.json"):
            service.objects[f"{FOLDER}/{name}"] = b"x"
    store = CountingStore(service)
    assert begin_attempt([store], many_ranks.RUN) == 2
    assert not store.list("step-")
    pages = -(-2 * world_size // 1000)
    assert store.requests == {"GET": 1, "PUT": 2, "LIST": 3 + pages + 1, "DELETE": pages}


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_of_a_restore_do_not_grow_with_the_ranks(world_size: int, tmp_path: Path, is_in_runs: bool) -> None:
    service = Service()
    real_ranks = (0, 1, world_size // 2, world_size - 1)
    many_ranks.save(service, tmp_path, state_of(world_size), real_ranks)
    manifest = read_manifest(CountingStore(service), FOLDER)
    for rank in real_ranks:
        store = CountingStore(service)
        values = small.empty()
        fragments = small.share(values, rank, world_size)
        assert fill(store, FOLDER, read_manifest(store, FOLDER), fragments, manifest.files[rank : rank + 1]) == []
        expected = small.share(small.content(10), rank, world_size)
        for fragment, wanted in zip(fragments, expected, strict=True):
            assert all(bool((fragment.views[kind] == wanted.views[kind]).all()) for kind in wanted.views)
        # Manifest; header and size of one file; the header again, for its list; one range with all tensors.
        assert store.num_requests <= 4 + is_in_runs


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("world_size", [1, 2, 16, 17, 30])
def test_a_checkpoint_of_any_number_of_ranks_is_read_whole(world_size: int, tmp_path: Path, is_in_runs: bool) -> None:
    target = LocalStore(tmp_path / "target")
    values = small.content(10)
    writers = [CheckpointWriter([target], tmp_path / "staging", r, 1, small.KEEP_ALL) for r in range(world_size)]
    for rank, writer in enumerate(writers):
        writer.save(state_of(world_size), small.share(values, rank, world_size))
    for writer in writers:
        writer.close()
    assert {key for key in target.list() if key.endswith(".json")} == {f"{FOLDER}/manifest.json"}
    loaded = small.empty()
    found, notes = load_newest([target], small.share(loaded, 0, 1), state_of(1, step=0))
    assert found == state_of(world_size)
    assert notes == []
    assert small.equal(loaded, values)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("at", [100, -3], ids=["in the header", "in a tensor"])
def test_a_damaged_file_is_found_set_aside_and_repaired(tmp_path: Path, at: int, is_in_runs: bool) -> None:
    targets: list[Store] = [LocalStore(tmp_path / name) for name in ("a", "b")]
    small.save(targets, tmp_path / "staging", 9, fields={"zero_stage": 3})
    small.save(targets, tmp_path / "staging", 10, fields={"zero_stage": 3})
    small.damage(targets[0], f"{FOLDER}/rank-00001.safetensors", at)
    assert len(verify(targets[0], FOLDER)[1]) == 1
    values = small.empty()
    found, notes = load_newest(targets, small.share(values, 0, 1), small.state_at(0))
    assert found is not None
    assert found.step == 10
    assert small.equal(values, small.content(10))
    assert len(notes) == 1
    assert "is set aside" in notes[0]
    lines = list(repair(targets, [], dry_run=False))
    assert any("restored from" in line for line in lines)
    assert verify(targets[0], FOLDER)[1] == []
    assert targets[0].read(f"{FOLDER}/manifest.json") == targets[1].read(f"{FOLDER}/manifest.json")


def test_every_changed_byte_of_a_manifest_with_runs_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_runs, "_MOST_LISTED_TENSORS", 0)
    store = LocalStore(tmp_path)
    small.save([store], tmp_path / "staging", 10, fields={"zero_stage": 3})
    data = store.read(f"{FOLDER}/manifest.json")
    manifest = Manifest.parse(data)
    assert manifest.runs is not None
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(Exception, match=r"manifest\.json"):
            Manifest.parse(bytes(damaged))
    for runs in ({**manifest.runs, "dense.bias": ((1, 3), (1, 3))}, {**manifest.runs, "x": ((2, 1),)}):
        with pytest.raises(Exception, match=r"manifest\.json is inconsistent"):
            Manifest.parse(manifest.model_copy(update={"runs": runs}).dump())


def test_the_manifest_of_electra_large_at_zero_3_on_1024_ranks_is_below_5_megabytes() -> None:
    """A list of all tensors would take 270 MB. The towers have 24 layers of 1,024 and of 256 hidden units."""
    world_size = 1024
    shapes = {"towers.embeddings.word.weight": [30522, 1024]}
    for tower, hidden, inner in (("discriminator", 1024, 4096), ("generator", 256, 1024)):
        for layer in range(24):
            prefix = f"towers.{tower}.encoder.layers.{layer}"
            for name in ("query", "key", "value", "output"):
                shapes |= {f"{prefix}.{name}.weight": [hidden, hidden], f"{prefix}.{name}.bias": [hidden]}
            shapes |= {f"{prefix}.inner.weight": [inner, hidden], f"{prefix}.inner.bias": [inner]}
            shapes |= {f"{prefix}.outer.weight": [hidden, inner], f"{prefix}.outer.bias": [hidden]}
    runs = {}
    for name, shape in shapes.items():
        numel = shape[0] * (shape[1] if len(shape) > 1 else 1)
        part = -(-numel // world_size)
        sizes = [max(0, min(part, numel - rank * part)) for rank in range(world_size)]
        starts = [rank * part if size else None for rank, size in enumerate(sizes)]
        parts = [parameter_runs.Parts(start, ((1, size),)) for start, size in zip(starts, sizes, strict=True)]
        runs[name] = parameter_runs.join(name, parts).runs
    files = tuple(
        FileEntry(
            name=f"rank-{rank:05d}.safetensors",
            size_bytes=4_600_000 + rank,
            header_bytes=300_000,
            header_sha256=f"{rank:064x}",
            tensors=(),
        )
        for rank in range(world_size)
    )
    state = small.state_at(10, world_size=world_size, zero_stage=3, shapes=shapes)
    manifest = Manifest(format=3, saved_at="2026-01-01T00:00:00+00:00", state=state, files=files, runs=runs)
    data = manifest.dump()
    assert len(data) < 5_000_000
    assert Manifest.parse(data) == manifest


def test_all_targets_receive_a_file_at_the_same_time(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=60)

    class Slow(LocalStore):
        """Store whose uploads go on only when two of them have begun at the same time."""

        def upload(self, path: Path, key: str) -> None:
            together.wait()
            super().upload(path, key)

    targets: list[Store] = [LocalStore(tmp_path / "first"), Slow(tmp_path / "second"), Slow(tmp_path / "third")]
    small.save(targets, tmp_path / "staging", 10, world_size=1)
    assert [committed(target) for target in targets] == [[(10, 1, FOLDER)]] * 3


def test_the_next_save_does_not_wait_for_the_deletion_of_old_checkpoints(tmp_path: Path) -> None:
    may_delete = threading.Event()

    class SlowDeletion(LocalStore):
        """Store that deletes a manifest only after `may_delete` was set."""

        def delete(self, key: str) -> None:
            if key.endswith("manifest.json"):
                assert may_delete.wait(60)
            super().delete(key)

    target = SlowDeletion(tmp_path / "target")
    writer = CheckpointWriter([target], tmp_path / "staging", 0, 1, CheckpointConfig(keep_last=1))
    writer.save(small.state_at(1, world_size=1), small.share(small.content(1), 0, 1))
    writer.wait()
    assert writer._deletion is not None
    writer._deletion.join()  # it finds nothing to delete; a late one would find the first checkpoint beside the second
    writer.save(small.state_at(2, world_size=1), small.share(small.content(2), 0, 1))
    writer.wait()
    assert [step for step, _, _ in committed(target)] == [1, 2]
    writer.save(small.state_at(3, world_size=1), small.share(small.content(3), 0, 1))
    may_delete.set()
    writer.close()
    assert [step for step, _, _ in committed(target)] == [3]


def test_an_error_of_the_deletion_is_raised_at_the_end(tmp_path: Path) -> None:
    class Refusing(LocalStore):
        """Store that refuses to delete a manifest."""

        def delete(self, key: str) -> None:
            if key.endswith("manifest.json"):
                raise PermissionError(key)
            super().delete(key)

    writer = CheckpointWriter(
        [Refusing(tmp_path / "target")], tmp_path / "staging", 0, 1, CheckpointConfig(keep_last=1)
    )
    for step in (1, 2):
        writer.save(small.state_at(step, world_size=1), small.share(small.content(step), 0, 1))
    with pytest.raises(PermissionError):
        writer.close()
