"""The manifest: every change of it is detected, and it lists the files of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints as small

from electra_dist.checkpoint.checkpoint_manifest import (
    KINDS,
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    committed,
    folder_name,
    read_manifest,
)
from electra_dist.errors import TornCheckpoint
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
    state = small.state_at(3).model_copy(update={"eval_rtd_loss": loss, "shapes": {}, "rows_digest": 2**64 - 1})
    manifest = Manifest(saved_at="2026-01-01T00:00:00+00:00", state=state, files=())
    again = Manifest.parse(manifest.dump()).state
    assert (again.eval_rtd_loss, again.rows_digest) == (kept, 2**64 - 1)


def test_manifest_whose_tensors_do_not_cover_a_file_is_refused(saved: Path) -> None:
    manifest = Manifest.parse((saved / MANIFEST).read_bytes())
    file = manifest.files[0]
    holes = {
        "no tensor at all": file.model_copy(update={"tensors": ()}),
        "one tensor fewer": file.model_copy(update={"tensors": file.tensors[:-1]}),
        "a byte more": file.model_copy(update={"size_bytes": file.size_bytes + 4}),
    }
    for hole in holes.values():
        with pytest.raises(TornCheckpoint):
            Manifest.parse(manifest.model_copy(update={"files": (hole, *manifest.files[1:])}).dump())


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ([(0, 2), (2, 3), (3, 5)], None),
        ([(0, 2), (3, 5)], "elements 2 to 3 of exp_avg of w are missing or stored twice"),
        ([(0, 3), (2, 5)], "elements 2 to 3 of exp_avg of w are missing or stored twice"),
        ([(1, 5)], "elements 0 to 1 of exp_avg of w are missing or stored twice"),
        ([(0, 4)], "it lists 4 of the 5 elements of exp_avg of w"),
    ],
)
def test_manifest_with_a_hole_or_an_overlap_in_a_parameter_is_refused(
    ranges: list[tuple[int, int]], fault: str | None
) -> None:
    """The files have no gap between tensors, but together they lack elements of a parameter or have them twice."""
    tensors: list[TensorEntry] = []
    for kind in KINDS:
        for start, end in ranges if kind == "exp_avg" else [(0, 5)]:
            offset = sum(tensor.size_bytes for tensor in tensors)
            tensors.append(
                TensorEntry(kind=kind, name="w", start=start, numel=end - start, offset=offset, sha256="0" * 64)
            )
    size = sum(tensor.size_bytes for tensor in tensors)
    file = FileEntry(name="x", size_bytes=size, header_bytes=0, header_sha256="0" * 64, tensors=tuple(tensors))
    state = small.state_at(3).model_copy(update={"shapes": {"w": [5]}})
    data = Manifest(saved_at="2026-01-01T00:00:00+00:00", state=state, files=(file,)).dump()
    if fault is None:
        assert Manifest.parse(data).files == (file,)
    else:
        with pytest.raises(TornCheckpoint, match=fault):
            Manifest.parse(data)


def test_folder_renamed_to_another_step_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], tmp_path / "staging", 4)
    (tmp_path / folder_name(4, 1)).rename(tmp_path / folder_name(5, 1))
    assert committed(store) == [(5, 1, folder_name(5, 1))]
    with pytest.raises(TornCheckpoint, match="another checkpoint: step 4"):
        read_manifest(store, folder_name(5, 1))
