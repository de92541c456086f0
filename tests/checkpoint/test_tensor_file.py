"""Tensor files: the safetensors library reads them, and digests cover every byte."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints as small

from electra_dist.checkpoint import writer
from electra_dist.checkpoint.manifest import KINDS, MANIFEST, Manifest, tensors_of_header
from electra_dist.checkpoint.writer import Tensor, TensorFile
from electra_dist.store.open_store import LocalStore


def test_safetensors_library_reads_the_same_numbers(saved: Path) -> None:
    files = [load_file(saved / file.name) for file in Manifest.parse((saved / MANIFEST).read_bytes()).files]
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
        for tensor in tensors_of_header(file, data[: file.header_bytes]):
            assert tensor.offset == covered
            covered += tensor.size_bytes
            assert hashlib.sha256(data[tensor.offset : covered]).hexdigest() == tensor.sha256
        assert covered == len(data)


def test_large_tensor_is_divided_into_pieces_with_their_own_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PIECE", 100)
    values = torch.arange(250, dtype=torch.float32)
    file = TensorFile(0, [Tensor(kind="master", name="w", start=30, values=values)])
    LocalStore(tmp_path).write_pieces("x", file.pieces)
    assert [(t.start, t.numel) for t in tensors_of_header(file.entry, file.header)] == [
        (30, 100),
        (130, 100),
        (230, 50),
    ]
    read = load_file(tmp_path / "x")
    assert torch.equal(torch.cat([read[f"master|w|{start}"] for start in (30, 130, 230)]), values)


def test_a_file_gets_its_name_when_it_is_whole_and_synced_and_then_its_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 takes each file that a listing shows for whole, and no power failure may cut it off later."""
    synced: list[tuple[str, bytes, bool]] = []  # each name, and the content of the file at that time

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(tmp_path):
            synced.append((path.suffix, b"" if path.is_dir() else path.read_bytes(), (tmp_path / "x").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    tensor = Tensor(kind="master", name="w", start=0, values=torch.arange(9, dtype=torch.float32))
    LocalStore(tmp_path).write_pieces("x", TensorFile(0, [tensor]).pieces)
    assert synced == [(".tmp", (tmp_path / "x").read_bytes(), False), ("", b"", True)]
