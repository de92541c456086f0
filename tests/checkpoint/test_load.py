"""Verified ranged load: any world size into any other, who reads which bytes, what is used when something is bad."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoints as small

from electra_dist.checkpoint import read, tensor_file
from electra_dist.checkpoint.load import assemble, load_newest
from electra_dist.checkpoint.manifest import (
    KINDS,
    MANIFEST,
    SET_ASIDE,
    RunState,
    committed,
    folder_name,
    read_manifest,
)
from electra_dist.checkpoint.read import fill, requests, verify
from electra_dist.errors import StoreError, StoreExhausted, UserError
from electra_dist.store.interface import Store
from electra_dist.store.local import LocalStore
from electra_dist.store.open import open_store

FILE = "rank-00001.safetensors"


def load(targets: list[Store], **expected: object) -> tuple[RunState | None, list[str], small.Content]:
    values = small.empty()
    found, notes = load_newest(targets, small.share(values, 0, 1), small.state_at(0, **expected))
    return found, notes, values


def damage(store: Store, key: str, at: int = -5) -> None:
    data = bytearray(store.read(key))
    data[at] ^= 1
    store.write(key, bytes(data))


@pytest.mark.parametrize("saved_by", [1, 2, 3, 7])
@pytest.mark.parametrize("piece", [1 << 22, 50])
def test_any_world_size_loads_any_other_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: int, piece: int
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", piece)
    store = open_store(str(tmp_path))
    small.save([store], tmp_path / "staging", 5, world_size=saved_by)
    manifest = read_manifest(store, folder_name(5, 1))
    for world_size in (1, 2, 4, 11):
        values = small.empty()
        for rank in range(world_size):
            check = manifest.files[rank::world_size]
            assert fill(store, folder_name(5, 1), manifest, small.share(values, rank, world_size), check) == []
        assert small.equal(values, small.content(5))


class Recorder(LocalStore):
    """Remembers which bytes were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def read_range(self, key: str, start: int, length: int, *, promised: bool = False) -> memoryview:
        self.ranges[key].append((start, start + length))
        return super().read_range(key, start, length, promised=promised)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_together_read_every_byte_and_each_little_more_than_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 16)
    monkeypatch.setattr(read, "REQUEST_BYTES", 1000)
    small.save([open_store(str(tmp_path))], tmp_path / "staging", 5, world_size=3)
    read_bytes = defaultdict[str, set[int]](set)
    for rank in range(world_size):
        store = Recorder(tmp_path)
        manifest = read_manifest(store, folder_name(5, 1))
        held = small.share(small.empty(), rank, world_size)
        assert fill(store, folder_name(5, 1), manifest, held, manifest.files[rank::world_size]) == []
        headers = sum(file.header_bytes for file in manifest.files[rank::world_size])
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
    small.save([store], tmp_path / "staging", 5)
    file = read_manifest(store, folder_name(5, 1)).files[0]
    assert [r.size_bytes for r in requests(file)] == [file.size_bytes - file.header_bytes]
    masters = list(requests(file, lambda tensor: tensor.kind == "master"))
    assert len(masters) == 1 and {t.kind for t in masters[0].tensors} == {"master"}


@pytest.mark.usefixtures("one_rank")
def test_newest_good_one_is_loaded_and_the_damaged_one_set_aside(target: Store, tmp_path: Path) -> None:
    for step in (10, 20, 35):
        small.save([target], tmp_path / "staging", step)
    damage(target, f"{folder_name(35, 1)}/{FILE}")
    found, notes, values = load([target])
    assert found == small.state_at(20) and small.equal(values, small.content(20))
    assert len(notes) == 1 and f"{target.url}/{folder_name(35, 1)} is set aside: exp_avg_sq of" in notes[0]
    assert notes[0].endswith("step 20 is used instead, 15 steps are done again")
    assert target.exists(f"{folder_name(35, 1)}/{SET_ASIDE}") and len(committed(target)) == 2
    assert load([target])[1] == []  # it is not tried again


@pytest.mark.usefixtures("one_rank")
def test_none_good_is_told_and_returns_nothing(target: Store, tmp_path: Path) -> None:
    small.save([target], tmp_path / "staging", 10)
    target.delete(f"{folder_name(10, 1)}/{FILE}")
    found, notes, _ = load([target])
    assert found is None and committed(target) == []
    assert "rank-00001.safetensors is missing; no other one is left" in notes[0]
    assert load([target])[:2] == (None, [])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bad", [0, 1])
def test_same_step_of_the_other_target_is_taken_before_an_older_one(
    two_targets: list[Store], tmp_path: Path, bad: int
) -> None:
    for step in (10, 20):
        small.save(two_targets, tmp_path / "staging", step)
    damage(two_targets[bad], f"{folder_name(20, 1)}/{FILE}", at=3)
    found, notes, values = load(two_targets)
    assert found == small.state_at(20) and small.equal(values, small.content(20))
    if bad == 0:
        assert notes[0].endswith(f"; the same step is good in {two_targets[1].url}")
        assert not two_targets[0].exists(f"{folder_name(20, 1)}/{MANIFEST}")
    else:  # the preferred one is good: the other is not looked at
        assert notes == []


@pytest.mark.usefixtures("one_rank")
def test_newest_over_all_targets_is_taken(two_targets: list[Store], tmp_path: Path) -> None:
    small.save(two_targets, tmp_path / "staging", 10)
    small.save(two_targets[1:], tmp_path / "staging", 20)
    small.save(two_targets[:1], tmp_path / "staging", 20, attempt=2, run=1)
    found, notes, values = load(two_targets)
    assert (found, notes) == (small.state_at(20, 2), [])
    assert small.equal(values, small.content(20, run=1))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        ({"identity_sha256": "1" * 64}, "another config"),
        ({"corpus_fingerprint": "other"}, "another corpus"),
        ({"shapes": {"word.weight": [1]}}, "other parameter shapes"),
        ({"shared": {}}, "other shared parameters"),
        ({"skipped": (3, 9)}, "skips other steps"),
        ({"skipped": ()}, "skips other steps"),
    ],
)
def test_checkpoint_of_another_run_is_not_loaded(tmp_path: Path, difference: dict, reason: str) -> None:
    store = open_store(str(tmp_path))
    small.save([store], tmp_path / "staging", 10, fields={"skipped": (3,)})
    found, notes, _ = load([store], **{"skipped": (3,), **difference})
    assert found is None and reason in notes[0]


@pytest.mark.usefixtures("one_rank")
def test_steps_skipped_after_a_checkpoint_do_not_matter_to_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], tmp_path / "staging", 10, fields={"skipped": (3,)})
    found, notes, _ = load([store], skipped=(3, 10, 11))
    assert found is not None and notes == []


class Unreadable(LocalStore):
    """A store whose ranges cannot be read, though they are there."""

    def read_range(self, key: str, start: int, length: int, *, promised: bool = False) -> memoryview:
        raise StoreExhausted(f"{self.url}/{key}: failed 30 times in a row; check the service, then start again")


@pytest.mark.usefixtures("one_rank")
def test_unreachable_bytes_cost_no_steps(tmp_path: Path) -> None:
    targets = [Unreadable(tmp_path / "a"), open_store(str(tmp_path / "b"))]
    for step in (10, 20):
        small.save(targets, tmp_path / "staging", step)
    found, notes, _ = load(targets)
    assert found == small.state_at(20) and notes == []  # read from the other target
    with pytest.raises(StoreError, match="failed 30 times"):
        load(targets[:1])
    assert len(committed(targets[0])) == 2  # nothing is set aside, no older one is taken


def test_verify_names_everything_that_is_wrong(target: Store, tmp_path: Path) -> None:
    small.save([target], tmp_path / "staging", 10, world_size=3)
    folder = folder_name(10, 1)
    assert verify(target, folder)[1] == []
    damage(target, f"{folder}/rank-00000.safetensors", at=20)
    target.write(f"{folder}/{FILE}", target.read(f"{folder}/{FILE}") + b"x")
    target.delete(f"{folder}/rank-00002.safetensors")
    assert [fault.replace(",", "") for fault in verify(target, folder)[1]] == [
        "the header of rank-00000.safetensors does not match its digest",
        f"rank-00001.safetensors has {target.size(f'{folder}/{FILE}')} instead of "
        f"{target.size(f'{folder}/{FILE}') - 1} bytes",
        "rank-00002.safetensors is missing",
    ]


def test_assembled_weights_are_the_saved_ones(target: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        small.save([target], tmp_path / "staging", step, world_size=3)
    damage(target, f"{folder_name(20, 1)}/{MANIFEST}")
    state, weights, notes = assemble([target])
    assert state == small.state_at(10, world_size=3)
    assert "does not match" in notes[0] or "not in the form" in notes[0] or "not readable" in notes[0]
    for name, shape in small.SHAPES.items():
        assert torch.equal(weights[name], small.content(10)[name]["master"].view(shape))


def test_the_checkpoint_of_a_step_is_assembled_and_no_other(target: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        small.save([target], tmp_path / "staging", step)
    state, weights, _ = assemble([target], 10)
    assert state.step == 10
    name, shape = next(iter(small.SHAPES.items()))
    assert torch.equal(weights[name], small.content(10)[name]["master"].view(shape))
    with pytest.raises(UserError, match="there is none of step 15"):
        assemble([target], 15)


def test_assemble_without_a_checkpoint_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is none yet"):
        assemble([open_store(str(tmp_path))])


def test_s3_ranges_are_asked_for_as_ranges(open_s3: Callable[[str], Store]) -> None:
    store = open_s3("ranges")
    store.write("x", bytes(range(200)))
    assert store.read_range("x", 10, 5) == bytes(range(10, 15))
