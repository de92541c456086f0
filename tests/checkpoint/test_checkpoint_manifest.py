"""The manifest: every change of it is detected, and it lists the files of its folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints as small
from support.checkpoints import committed, folder_name, read_manifest

from electra_dist.checkpoint.manifest import MANIFEST, FileEntry, Manifest, part
from electra_dist.errors import TornCheckpoint
from electra_dist.store.json_file import canonical_json
from electra_dist.store.open_store import open_store


def test_committed_folder_holds_only_the_manifest_and_the_files_that_it_lists(saved: Path) -> None:
    manifest = Manifest.parse((saved / MANIFEST).read_bytes())
    assert {path.name for path in saved.iterdir()} == {MANIFEST, *(file.name for file in manifest.files)}


def test_every_changed_byte_of_a_manifest_is_detected(saved: Path) -> None:
    data = (saved / MANIFEST).read_bytes()
    Manifest.parse(data)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(TornCheckpoint):
            Manifest.parse(bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(junk=st.binary(max_size=40), cut=st.integers(0, 10_000))
def test_truncated_or_extended_manifest_is_detected(saved: Path, junk: bytes, cut: int) -> None:
    data = (saved / MANIFEST).read_bytes()
    for damaged in (data[: cut % len(data)], data[: cut % len(data)] + junk, data + junk + b" "):
        with pytest.raises(TornCheckpoint):
            Manifest.parse(damaged)


@pytest.mark.parametrize(
    ("loss", "kept"), [(0.1 + 0.2, 0.1 + 0.2), (1e22, 1e22), (float("nan"), None), (float("inf"), None)]
)
def test_finite_losses_are_stored_exactly_and_others_as_none(loss: float, kept: float | None) -> None:
    state = small.state_at(3).model_copy(
        update={"eval_loss": loss, "shapes": {}, "world_size": 0, "rows_digest": 2**64 - 1}
    )
    manifest = Manifest(saved_at="2026-01-01T00:00:00+00:00", state=state, files=(), ranges={})
    again = Manifest.parse(manifest.dump()).state
    assert (again.eval_loss, again.rows_digest) == (kept, 2**64 - 1)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_manifest_whose_tensors_do_not_cover_a_file_is_refused(tmp_path: Path, zero_stage: int) -> None:
    store = open_store(str(tmp_path))
    small.save([store], 4, fields={"zero_stage": zero_stage})
    manifest = read_manifest(store, folder_name(4, 1))
    first, second = manifest.files
    holes = {
        "a byte more": (replace(first, size_bytes=first.size_bytes + 4), second),
        "a shorter header": (replace(first, header_bytes=first.header_bytes - 8), second),
        "a file fewer": (first,),
        "another order": (second, first),
        "a file twice": (first, first),
        "a file of no rank": (first, second, replace(second, rank=2)),
    }
    for files in holes.values():
        with pytest.raises(TornCheckpoint, match="is inconsistent"):
            Manifest.parse(manifest.model_copy(update={"files": files}).dump())


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ([(1, 0, 2), (0, 2, 3), (1, 3, 5)], None),
        ([(0, 0, 2), (1, 3, 5)], "elements 2 to 3 of w are missing or stored twice"),
        ([(0, 0, 3), (1, 2, 5)], "elements 2 to 3 of w are missing or stored twice"),
        ([(0, 1, 5)], "elements 0 to 1 of w are missing or stored twice"),
        ([(0, 0, 4)], "it lists 4 of the 5 elements of w"),
        ([(2, 0, 5)], "elements 0 to 0 of w are missing"),
    ],
)
def test_manifest_with_a_hole_or_an_overlap_in_a_parameter_is_refused(
    ranges: list[tuple[int, int, int]], fault: str | None
) -> None:
    sizes = [sum(end - start for rank, start, end in ranges if rank == file) for file in (0, 1)]
    files = tuple(
        FileEntry(rank=rank, size_bytes=8 + 12 * size, header_bytes=8, header_sha256="0" * 64)
        for rank, size in enumerate(sizes)
    )
    state = small.state_at(3).model_copy(update={"shapes": {"w": [5]}})
    manifest = Manifest(saved_at="2026-01-01T00:00:00+00:00", state=state, files=files, ranges={"w": tuple(ranges)})
    if fault is None:
        assert Manifest.parse(manifest.dump()) == manifest
    else:
        with pytest.raises(TornCheckpoint, match=fault):
            Manifest.parse(manifest.dump())


@settings(deadline=None)
@given(numel=st.integers(0, 500), world_size=st.integers(1, 60))
def test_the_parts_of_a_parameter_follow_one_another_and_are_found_again(numel: int, world_size: int) -> None:
    parts = [part(numel, world_size, rank) for rank in range(world_size)]
    assert [element for start, end in parts for element in range(start, end)] == list(range(numel))
    state = small.state_at(1, world_size=world_size, zero_stage=3, shapes={"w": [numel]})
    manifest = Manifest(saved_at="", state=state, files=())
    for start in range(0, numel, 7):
        for end in (start + 1, (start + numel + 1) // 2, numel):
            if start < end:
                holders = [rank for rank, (first, last) in enumerate(parts) if first < end and start < last]
                assert list(manifest.ranks_with("w", start, end)) == [r for r in holders if parts[r][0] < parts[r][1]]


def test_only_the_exact_name_of_a_tensor_file_is_one() -> None:
    entry = FileEntry(rank=3, size_bytes=4096, header_bytes=96, header_sha256="0a" * 32)
    assert entry.name == f"rank-00003.4096.96.{'0a' * 32}.safetensors"
    assert FileEntry.parse(entry.name) == entry
    for other in (
        f"{entry.name}.bak",
        entry.name.upper(),
        entry.name.replace(".96.", ".096."),
        "rank-00003.safetensors",
    ):
        assert FileEntry.parse(other) is None


def test_a_manifest_of_another_format_is_refused_in_one_line_that_says_so(saved: Path) -> None:
    """Formats 2 and 3 were those of commits before the first release."""
    tree = json.loads((saved / MANIFEST).read_bytes())
    for number in (2, 3, 99):
        changed = {**{name: value for name, value in tree.items() if name != "sha256"}, "format": number}
        digest = hashlib.sha256(canonical_json(changed).encode()).hexdigest()
        data = canonical_json({**changed, "sha256": digest}).encode() + b"\n"
        with pytest.raises(TornCheckpoint, match="a format that this version of electra-dist cannot read") as caught:
            Manifest.parse(data)
        assert "\n" not in str(caught.value)


def test_folder_renamed_to_another_step_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], 4)
    (tmp_path / folder_name(4, 1)).rename(tmp_path / folder_name(5, 1))
    assert committed(store) == [(5, 1, folder_name(5, 1))]
    with pytest.raises(TornCheckpoint, match="another checkpoint: step 4"):
        read_manifest(store, folder_name(5, 1))
