"""Verified reads of ranges: loading at any world size, the bytes that each rank reads, and the faults found."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from support import checkpoints as small
from support.checkpoints import checkpoint_in, folder_name, verify

from electra_dist.checkpoint import reader, writer
from electra_dist.checkpoint.manifest import KINDS
from electra_dist.checkpoint.reader import CheckpointReader, requests
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore, open_store


@pytest.mark.parametrize("saved_by", [1, 2, 3, 7])
@pytest.mark.parametrize("piece", [1 << 22, 50])
def test_checkpoint_of_any_world_size_loads_at_any_other_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: int, piece: int
) -> None:
    monkeypatch.setattr(writer, "PIECE", piece)
    store = open_store(str(tmp_path))
    small.save([store], 5, world_size=saved_by)
    opened = CheckpointReader(checkpoint_in(store, folder_name(5, 1)))
    for world_size in (1, 2, 4, 11):
        values = small.empty()
        for rank in range(world_size):
            check = opened.manifest.files[rank::world_size]
            assert opened.fill(small.share(values, rank, world_size), check) == []
        assert small.equal(values, small.content(5))


class Recorder(LocalStore):
    """Local store that records the ranges of bytes that were read of each key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        self.ranges[key].append((start, start + length))
        return super().read_range(key, start, length)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_together_read_every_byte_and_each_reads_little_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(writer, "PIECE", 16)
    monkeypatch.setattr(reader, "REQUEST_BYTES", 1000)
    small.save([open_store(str(tmp_path))], 5, world_size=3)
    read_bytes = defaultdict[str, set[int]](set)
    for rank in range(world_size):
        store = Recorder(tmp_path)
        opened = CheckpointReader(checkpoint_in(store, folder_name(5, 1)))
        manifest = opened.manifest
        held = small.share(small.empty(), rank, world_size)
        assert opened.fill(held, manifest.files[rank::world_size]) == []
        # Each header is read once, and before anything else of its file.
        headers = sum(ranges[0][1] for ranges in store.ranges.values())
        total = sum(end - start for ranges in store.ranges.values() for start, end in ranges) - headers
        needed = 4 * len(KINDS) * sum(fragment.numel for fragment in held)
        assert needed <= total <= needed + 4 * 16 * len(KINDS) * 2  # at most a piece at either end
        assert max(end - start for ranges in store.ranges.values() for start, end in ranges) <= max(
            1000, max(file.header_bytes for file in manifest.files)
        )
        for key, ranges in store.ranges.items():
            read_bytes[key].update(at for start, end in ranges for at in range(start, end))
    for file in manifest.files:
        assert read_bytes[f"{folder_name(5, 1)}/{file.name}"] == set(range(file.size_bytes))


def test_neighbouring_tensors_are_read_in_one_request(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], 5)
    checkpoint = checkpoint_in(store, folder_name(5, 1))
    file = checkpoint.manifest().files[0]
    tensors, fault = checkpoint.tensors(file)
    assert fault == ""
    assert [r.size_bytes for r in requests(file, tensors)] == [file.size_bytes - file.header_bytes]
    masters = list(requests(file, tensors, lambda tensor: tensor.kind == "master"))
    assert len(masters) == 1 and {t.kind for t in masters[0].tensors} == {"master"}


def test_verify_names_every_damaged_file(target: Store, tmp_path: Path) -> None:
    small.save([target], 10, world_size=3)
    folder = folder_name(10, 1)
    assert verify(target, folder)[1] == []
    first, second, third = (small.file_of(target, 10, rank) for rank in range(3))
    small.damage(target, first, at=20)
    target.write(second, target.read(second) + b"x")
    target.delete(third)
    faults = [fault.replace(",", "").partition(" (found ")[0] for fault in verify(target, folder)[1]]
    names = [key.removeprefix(f"{folder}/") for key in (first, second, third)]
    assert faults == [
        f"the header of {names[0]} does not match its digest",
        f"{names[1]} has {target.size(second)} instead of {target.size(second) - 1} bytes",
        f"{names[2]} is missing",
    ]
