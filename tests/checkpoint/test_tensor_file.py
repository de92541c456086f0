"""Tensor files: the safetensors library reads them, and digests cover every byte."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints as small

from electra_dist.checkpoint import tensor_file
from electra_dist.checkpoint.checkpoint_manifest import KINDS, MANIFEST, Manifest
from electra_dist.checkpoint.tensor_file import Tensor, write_tensor_file


def test_safetensors_library_reads_the_same_numbers(saved: Path) -> None:
    files = [load_file(saved / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    expected = small.content(7)
    for rank in range(2):
        for fragment in small.share(expected, rank, 2):
            for kind in KINDS:
                assert torch.equal(files[rank][f"{kind}|{fragment.name}|{fragment.start}"], fragment.views[kind])


def test_digests_match_the_bytes_and_cover_the_whole_file(saved: Path) -> None:
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


def test_large_tensor_is_divided_into_pieces_with_their_own_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 100)
    values = torch.arange(250, dtype=torch.float32)
    entry = write_tensor_file(tmp_path / "x", [Tensor(kind="master", name="w", start=30, values=values)])
    assert [(t.start, t.numel) for t in entry.tensors] == [(30, 100), (130, 100), (230, 50)]
    read = load_file(tmp_path / "x")
    assert torch.equal(torch.cat([read[f"master|w|{start}"] for start in (30, 130, 230)]), values)


@pytest.mark.parametrize("digests_in_header", [False, True])
def test_a_whole_file_and_then_its_folder_are_synced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests_in_header: bool
) -> None:
    """The manifest, which is written later, must never name a file that a power failure can still cut off."""
    synced: list[tuple[str, bytes]] = []  # each path, and the content of the file at that time

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(tmp_path):
            synced.append((str(path), b"" if path.is_dir() else path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    tensor = Tensor(kind="master", name="w", start=0, values=torch.arange(9, dtype=torch.float32))
    write_tensor_file(tmp_path / "x", [tensor], digests_in_header=digests_in_header)
    assert synced == [(str(tmp_path / "x"), (tmp_path / "x").read_bytes()), (str(tmp_path), b"")]
