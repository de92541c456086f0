"""Check the requests of saves, restores and starts of 64 to 1,024 ranks, and that the checkpoints can be read.

At ZeRO stage 3 the parameters are divided evenly; at stage 1 rank 0 reads from the headers what each file holds.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import checkpoints as small
from support import many_ranks
from support.checkpoints import checkpoint_in, committed, folder_name, read_manifest, verify
from support.counting_store import CountingStore, Service

from electra_dist.checkpoint.commit import Fenced, begin_attempt, commit
from electra_dist.checkpoint.manifest import KINDS, FileEntry, Manifest, RunState, part
from electra_dist.checkpoint.reader import CheckpointReader, load_newest
from electra_dist.checkpoint.repair import repair
from electra_dist.checkpoint.writer import CheckpointWriter, Tensor, TensorFile
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore

SIZES = (64, 512, 1024)
FOLDER = folder_name(10, 1)


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `os.fsync` by nothing, because a test writes thousands of files and depends on none after a crash."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=[1, 3])
def zero_stage(request: pytest.FixtureRequest) -> int:
    """A ZeRO stage of each way in which parameters are divided."""
    stage: int = request.param
    return stage


def state_of(world_size: int, zero_stage: int, step: int = 10) -> RunState:
    """Return the state of a run of so many ranks."""
    return small.state_at(step, world_size=world_size, zero_stage=zero_stage)


def pages_of(num_keys: int) -> int:
    """Return how many requests list so many keys."""
    return max(1, -(-num_keys // 1000))


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_of_a_save(world_size: int, tmp_path: Path, zero_stage: int) -> None:
    """The counts are those of the table in docs/results.md."""
    service = Service()
    begin_attempt([CountingStore(service)], many_ranks.RUN)
    old_names = [*(small.file_name(rank) for rank in range(world_size)), "manifest.json"]
    for name in old_names:
        service.objects[f"{folder_name(5, 1)}/{name}"] = b"x"
    counts = many_ranks.save(service, state_of(world_size, zero_stage))
    store = CountingStore(service)
    assert committed(store) == [(10, 1, FOLDER)]
    assert len(store.list()) == world_size + 2  # files, manifest and the number of the start: nothing is left
    assert counts.member.requests == {"PUT": 1}
    # PUT: file and manifest. LIST: the files, and the starts before the commit. GET: the headers.
    expected = {"PUT": 2, "LIST": pages_of(world_size) + 1}
    serial = 3 + pages_of(world_size)
    if zero_stage == 1:
        expected["GET"] = world_size
        serial += world_size // 16
    assert counts.commit.requests == expected
    assert counts.commit.num_serial == serial
    pages = pages_of(2 * world_size + 2) + pages_of(world_size)  # all checkpoints, then the old one
    # LIST: these pages, and the starts. DELETE: the manifest, and then pages of the old checkpoint's other files.
    assert counts.deletion.requests == {"LIST": pages + 1, "DELETE": 1 + pages_of(world_size)}


def test_a_commit_of_1024_ranks_sends_fewer_requests_in_a_row_than_with_merged_entries(tmp_path: Path) -> None:
    """Rank 0 sent 9 requests in a row at stage 3 when each rank stored an entry and leaders of groups merged them."""
    counts = many_ranks.save(Service(), state_of(1024, zero_stage=3))
    print(
        f"requests of a save at 1,024 ranks: rank 0 sends {counts.commit.num_serial} in a row, "
        f"{counts.commit.requests.total()} in all, and every other rank {counts.member.requests.total()}"
    )
    assert counts.commit.num_serial == 5


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_of_a_start_with_a_leftover_of_every_rank(world_size: int) -> None:
    service = Service()
    begin_attempt([CountingStore(service)], many_ranks.RUN)
    for rank in range(world_size):
        service.objects[f"{FOLDER}/{small.file_name(rank)}"] = b"x"
    store = CountingStore(service)
    assert begin_attempt([store], many_ranks.RUN) == 2
    assert not store.list("step-")
    pages = pages_of(world_size)
    assert store.requests == {"GET": 1, "PUT": 2, "LIST": 3 + pages + 1, "DELETE": pages}


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_of_a_restore_do_not_grow_with_the_ranks(world_size: int, tmp_path: Path, zero_stage: int) -> None:
    service = Service()
    state = state_of(world_size, zero_stage)
    many_ranks.save(service, state)
    manifest = read_manifest(CountingStore(service), FOLDER)
    for rank in (0, 1, world_size // 2, world_size - 1):
        store = CountingStore(service)
        values = small.empty()
        fragments = many_ranks.fragments_of(state, values, rank)
        reader = CheckpointReader(checkpoint_in(store, FOLDER))
        assert reader.fill(fragments, check=manifest.files[rank : rank + 1]) == []
        expected = many_ranks.fragments_of(state, small.content(10), rank)
        for fragment, wanted in zip(fragments, expected, strict=True):
            assert all(bool((fragment.views[kind] == wanted.views[kind]).all()) for kind in wanted.views)
        # Manifest; header and size of one file; one range with all tensors.
        assert store.num_requests <= 4


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("world_size", [1, 2, 16, 17, 30])
def test_a_checkpoint_of_any_number_of_ranks_is_read_whole(world_size: int, tmp_path: Path, zero_stage: int) -> None:
    target = LocalStore(tmp_path / "target")
    values = small.content(10)
    writers = [CheckpointWriter([target], r, small.KEEP_ALL) for r in range(world_size)]
    for rank, writer in enumerate(writers):
        state = state_of(world_size, zero_stage)
        writer.save(state, many_ranks.fragments_of(state, values, rank))
    for writer in writers:
        writer.close()
    assert {key for key in target.list() if key.endswith(".json")} == {f"{FOLDER}/manifest.json"}
    loaded = small.empty()
    found, notes, _ = load_newest([target], small.share(loaded, 0, 1), state_of(1, zero_stage, step=0))
    assert found == state_of(world_size, zero_stage)
    assert notes == []
    assert small.equal(loaded, values)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("at", [100, -3], ids=["in the header", "in a tensor"])
def test_a_damaged_file_is_found_set_aside_and_repaired(tmp_path: Path, at: int, zero_stage: int) -> None:
    targets: list[Store] = [LocalStore(tmp_path / name) for name in ("a", "b")]
    small.save(targets, 9, fields={"zero_stage": zero_stage})
    small.save(targets, 10, fields={"zero_stage": zero_stage})
    small.damage(targets[0], small.file_of(targets[0], 10), at)
    assert len(verify(targets[0], FOLDER)[1]) == 1
    values = small.empty()
    found, notes, _ = load_newest(targets, small.share(values, 0, 1), small.state_at(0))
    assert found is not None
    assert found.step == 10
    assert small.equal(values, small.content(10))
    assert len(notes) == 1
    assert "is set aside" in notes[0]
    lines = list(repair(targets, [], dry_run=False))
    assert any("restored from" in line for line in lines)
    assert verify(targets[0], FOLDER)[1] == []
    assert targets[0].read(f"{FOLDER}/manifest.json") == targets[1].read(f"{FOLDER}/manifest.json")


def test_every_changed_byte_of_a_file_is_detected(tmp_path: Path, zero_stage: int) -> None:
    store = LocalStore(tmp_path)
    small.save([store], 10, world_size=8, fields={"zero_stage": zero_stage})
    assert verify(store, FOLDER)[1] == []
    key = small.file_of(store, 10, rank=7)
    for place in range(store.size(key)):
        small.damage(store, key, place)
        assert len(verify(store, FOLDER)[1]) == 1
        small.damage(store, key, place)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_good_file_of_other_ranges_than_the_manifest_lists_is_refused(tmp_path: Path, zero_stage: int) -> None:
    """Nothing but a mistake of the writer could make such a file; its elements would be loaded as zeros."""
    store = LocalStore(tmp_path / "target")
    state = small.state_at(10, zero_stage=zero_stage, shapes={"w": [8], "x": [8]})
    files = []
    for rank, other in ((0, "w"), (1, "w")):
        tensors = [
            Tensor(kind=kind, name=name, start=4 * rank, values=torch.ones(4))
            for kind in KINDS
            for name in (other, "x")
        ]
        files.append(TensorFile(rank, tensors))
    ranges = dict.fromkeys(("w", "x"), ((0, 0, 4), (1, 4, 8)))
    swapped = TensorFile(
        1, [Tensor(kind=kind, name=name, start=0, values=torch.ones(4)) for kind in KINDS for name in ("w", "x")]
    )
    manifest = Manifest(
        saved_at="",
        state=state,
        files=(files[0].entry, swapped.entry),
        ranges=None if state.is_divided_evenly else ranges,
    )
    for file in (files[0], swapped):
        store.write_pieces(f"{FOLDER}/{file.entry.name}", file.pieces)
    store.write(f"{FOLDER}/manifest.json", manifest.dump())
    assert any("lists other ranges of parameters than the manifest" in fault for fault in verify(store, FOLDER)[1])


def test_a_rank_that_holds_other_parts_than_its_stage_gives_it_saves_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter([LocalStore(tmp_path)], 0, small.KEEP_ALL)
    writer.save(small.state_at(10, zero_stage=3), small.share(small.content(10), 0, 2))
    with pytest.raises(RuntimeError, match="rank 0 holds other parts of the parameters than ZeRO stage 3"):
        writer.close()
    assert not list(tmp_path.iterdir())


def test_the_manifest_of_electra_large_on_1024_ranks_is_below_1_megabyte(zero_stage: int) -> None:
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
    ranges = None if zero_stage == 3 else end_to_end(shapes, world_size)
    state = small.state_at(10, world_size=world_size, zero_stage=zero_stage, shapes=shapes)
    sizes = [0] * world_size
    for name, shape in shapes.items():
        for rank in range(world_size):
            start, end = part(math.prod(shape), world_size, rank)
            if ranges is None:
                sizes[rank] += 12 * (end - start)
        for rank, start, end in ranges[name] if ranges else ():
            sizes[rank] += 12 * (end - start)
    files = tuple(
        FileEntry(rank=rank, size_bytes=300_000 + size, header_bytes=300_000, header_sha256=f"{rank:064x}")
        for rank, size in enumerate(sizes)
    )
    manifest = Manifest(saved_at="2026-01-01T00:00:00+00:00", state=state, files=files, ranges=ranges)
    data = manifest.dump()
    assert len(data) < 1_000_000
    assert Manifest.parse(data) == manifest


def end_to_end(shapes: dict[str, list[int]], world_size: int) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """Return the ranges of parameters that are laid end to end and cut into equal pieces, one for each rank."""
    total = sum(math.prod(shape) for shape in shapes.values())
    cuts = [total * rank // world_size for rank in range(world_size + 1)]
    ranges = {}
    first = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        pieces = [(rank, max(cuts[rank] - first, 0), min(cuts[rank + 1] - first, numel)) for rank in range(world_size)]
        ranges[name] = tuple(piece for piece in pieces if piece[1] < piece[2])
        first += numel
    return ranges


class Stale(LocalStore):
    """Store on a file system that shows earlier sizes of files, until `may_show` was set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_show = threading.Event()
        self.num_listings = 0

    def sizes(self, prefix: str = "") -> dict[str, int]:
        self.num_listings += 1
        return {key: size if self.may_show.is_set() else size // 2 for key, size in super().sizes(prefix).items()}


def test_a_file_counts_when_a_listing_shows_its_whole_size(tmp_path: Path) -> None:
    target = Stale(tmp_path / "target")
    writer = CheckpointWriter([target], 0, small.KEEP_ALL)
    writer.save(small.state_at(10, world_size=1), small.share(small.content(10), 0, 1))
    while target.num_listings < 3:
        assert committed(target) == []
    target.may_show.set()
    writer.close()
    assert verify(target, FOLDER)[1] == []


def test_two_files_of_one_rank_are_no_checkpoint(tmp_path: Path) -> None:
    """Only a second process with the number of this start can have written the other one."""
    target = LocalStore(tmp_path / "target")
    for run in (0, 1):
        tensors = many_ranks.tensors_of(small.share(small.content(10, run), 0, 1))
        many_ranks.store_file(target, small.state_at(10, world_size=1), 0, tensors)
    with pytest.raises(Fenced, match="another process has written its files"):
        commit(target, small.state_at(10, world_size=1), "2026-01-01T00:00:00+00:00")
    assert committed(target) == []


def test_a_commit_is_repeated_without_harm_and_that_of_another_process_is_refused(tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "target")
    state = small.state_at(10, world_size=1)
    tensors = many_ranks.tensors_of(small.share(small.content(10), 0, 1))
    many_ranks.store_file(target, state, 0, tensors)
    for _ in range(2):
        commit(target, state, "2026-01-01T00:00:00+00:00")
    with pytest.raises(Fenced, match="another process has committed this checkpoint"):
        commit(target, state, "2026-01-01T00:00:01+00:00")


def test_all_targets_receive_a_file_at_the_same_time(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=60)

    class Slow(LocalStore):
        """Store whose uploads go on only when two of them have begun at the same time."""

        def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
            together.wait()
            super().write_pieces(key, pieces)

    targets: list[Store] = [LocalStore(tmp_path / "first"), Slow(tmp_path / "second"), Slow(tmp_path / "third")]
    small.save(targets, 10, world_size=1)
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
    writer = CheckpointWriter([target], 0, CheckpointConfig(keep_last=1))
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

    writer = CheckpointWriter([Refusing(tmp_path / "target")], 0, CheckpointConfig(keep_last=1))
    for step in (1, 2):
        writer.save(small.state_at(step, world_size=1), small.share(small.content(step), 0, 1))
    with pytest.raises(PermissionError):
        writer.close()
