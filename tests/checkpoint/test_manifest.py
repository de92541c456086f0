"""The files and the manifest: what another library reads, and that no byte of a manifest may change."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import checkpoints as small

from electra_dist.checkpoint import tensor_file
from electra_dist.checkpoint.manifest import KINDS, MANIFEST, Manifest, committed, folder_name, read_manifest
from electra_dist.checkpoint.tensor_file import Tensor, write_tensor_file
from electra_dist.errors import TornCheckpoint
from electra_dist.store.open import open_store


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed checkpoint's folder."""
    folder = tmp_path_factory.mktemp("format")
    small.save([open_store(str(folder))], folder / "staging", 7)
    return folder / folder_name(7, 1)


def test_safetensors_library_reads_the_same_numbers(saved: Path) -> None:
    found = [load_file(saved / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    expected = small.content(7)
    for rank in range(2):
        for fragment in small.share(expected, rank, 2):
            for kind in KINDS:
                assert torch.equal(found[rank][f"{kind}|{fragment.name}|{fragment.start}"], fragment.views[kind])


def test_digests_are_those_of_the_bytes_and_leave_no_gap(saved: Path) -> None:
    manifest = Manifest.parse((saved / MANIFEST).read_bytes())
    for file in manifest.files:
        data = (saved / file.name).read_bytes()
        assert file.size_bytes == len(data)
        assert hashlib.sha256(data[: file.header_bytes]).hexdigest() == file.header_sha256
        covered = file.header_bytes
        for tensor in file.tensors:
            assert tensor.offset == covered
            covered += tensor.size_bytes
            assert hashlib.sha256(data[tensor.offset : covered]).hexdigest() == tensor.sha256
        assert covered == len(data)


def test_committed_folder_is_the_manifest_and_the_files_that_it_lists(saved: Path) -> None:
    manifest = Manifest.parse((saved / MANIFEST).read_bytes())
    assert {path.name for path in saved.iterdir()} == {MANIFEST, *(file.name for file in manifest.files)}


def test_large_tensor_is_cut_so_that_a_part_of_it_can_be_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 100)
    values = torch.arange(250, dtype=torch.float32)
    entry = write_tensor_file(tmp_path / "x", [Tensor(kind="master", name="w", start=30, values=values)])
    assert [(t.start, t.numel) for t in entry.tensors] == [(30, 100), (130, 100), (230, 50)]
    read = load_file(tmp_path / "x")
    assert torch.equal(torch.cat([read[f"master|w|{start}"] for start in (30, 130, 230)]), values)


def test_every_changed_byte_of_a_manifest_is_noticed(saved: Path) -> None:
    data = (saved / MANIFEST).read_bytes()
    Manifest.parse(data)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(TornCheckpoint):
            Manifest.parse(bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(junk=st.binary(max_size=40), cut=st.integers(0, 10_000))
def test_cut_or_continued_manifest_is_noticed(saved: Path, junk: bytes, cut: int) -> None:
    data = (saved / MANIFEST).read_bytes()
    for damaged in (data[: cut % len(data)], data[: cut % len(data)] + junk, data + junk + b" "):
        with pytest.raises(TornCheckpoint):
            Manifest.parse(damaged)


@pytest.mark.parametrize(
    ("loss", "kept"), [(0.1 + 0.2, 0.1 + 0.2), (1e22, 1e22), (float("nan"), None), (float("inf"), None)]
)
def test_any_loss_survives_the_manifest(loss: float, kept: float | None) -> None:
    state = small.state_at(3).model_copy(update={"eval_rtd_loss": loss, "shapes": {}, "rows_digest": 2**64 - 1})
    manifest = Manifest(saved_at="2026-01-01T00:00:00+00:00", state=state, files=())
    again = Manifest.parse(manifest.dump()).state
    assert (again.eval_rtd_loss, again.rows_digest) == (kept, 2**64 - 1)


def test_manifest_whose_tensors_leave_a_hole_is_refused(saved: Path) -> None:
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


def test_folder_renamed_to_another_step_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], tmp_path / "staging", 4)
    (tmp_path / folder_name(4, 1)).rename(tmp_path / folder_name(5, 1))
    assert committed(store) == [(5, 1, folder_name(5, 1))]
    with pytest.raises(TornCheckpoint, match="is of step 4"):
        read_manifest(store, folder_name(5, 1))
