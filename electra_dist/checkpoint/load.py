"""Loading: the newest committed checkpoint whose every byte is what its manifest says, at any world size and stage.

Guarantee: digests are verified before anything is loaded (the ranks share the files); a checkpoint that is torn,
flipped, short, or of another run is named, set aside (renamed, not deleted) and the next older one is tried. All
ranks take the same one. No pickle is read. Each rank reads just the ranges that it holds.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open

from electra_dist.checkpoint.fragments import Fragment
from electra_dist.checkpoint.manifest import (
    FragmentEntry,
    Manifest,
    RankPart,
    RunState,
    committed,
    read_manifest,
    set_aside,
)
from electra_dist.checkpoint.save import tensor_name
from electra_dist.errors import StoreError, TornCheckpoint, UserError
from electra_dist.store import Store, file_sha256

T = TypeVar("T")


def load_newest(
    store: Store,
    staging: Path,
    fragments: Sequence[Fragment],
    expected: RunState,
) -> tuple[RunState | None, list[str]]:
    """Overwrite `fragments` with the newest good checkpoint. Collective.

    Args:
        expected: what this run is (identity, corpus, shapes); its step and world size are not compared.

    Returns:
        The state found, None if there is none; and one line for each checkpoint that was set aside.
    """
    notes: list[str] = []
    for _, _, folder in reversed(_on_rank_0(lambda: committed(store))):
        with tempfile.TemporaryDirectory(dir=_made(staging)) as scratch:
            reader = _Reader(store, folder, Path(scratch))
            manifest, fault = reader.open(expected)
            faults = [f for f in _gathered(fault) if f]
            if not faults and manifest is not None:
                reader.fill(manifest, fragments)
                return manifest.state, notes
        notes.append(f"checkpoint {folder} is set aside: {faults[0]}")
        if dist.get_rank() == 0:
            set_aside(store, folder, faults[0])
        dist.barrier()
    return None, notes


def assemble(store: Store, staging: Path) -> tuple[RunState, dict[str, torch.Tensor]]:
    """The newest good checkpoint's fp32 master weights, whole, outside any process group (for export).

    Raises:
        UserError: there is no checkpoint, or none is good.
    """
    faults = []
    for _, _, folder in reversed(committed(store)):
        with tempfile.TemporaryDirectory(dir=_made(staging)) as scratch:
            reader = _Reader(store, folder, Path(scratch))
            try:
                manifest = read_manifest(store, folder)
                for part in manifest.parts:
                    reader.verify(part)
            except (TornCheckpoint, StoreError) as error:
                faults.append(f"{folder}: {error}")
                continue
            weights = {name: torch.empty(shape) for name, shape in manifest.state.shapes.items()}
            whole = [
                Fragment(name=name, start=0, numel=weight.numel(), views={"master": weight.view(-1)})
                for name, weight in weights.items()
            ]
            reader.fill(manifest, whole)
            return manifest.state, weights
    found = f"none is good ({'; '.join(faults)})" if faults else "there is none yet"
    raise UserError(f"{store.url}: no checkpoint to read: {found}; train on, or name another run")


class _Reader:
    """One checkpoint folder, read by one rank."""

    def __init__(self, store: Store, folder: str, scratch: Path) -> None:
        self._store, self._folder, self._scratch = store, folder, scratch

    def open(self, expected: RunState) -> tuple[Manifest | None, str]:
        """(manifest, "") or (None, what is wrong with the share of it that this rank verified)."""
        try:
            manifest = read_manifest(self._store, self._folder)
            check_belongs(manifest.state, expected)
            for part in manifest.parts[dist.get_rank() :: dist.get_world_size()]:
                self.verify(part)
        except (TornCheckpoint, StoreError) as error:
            return None, str(error)
        return manifest, ""

    def fill(self, manifest: Manifest, fragments: Sequence[Fragment]) -> None:
        """Copy into every fragment the ranges that it overlaps."""
        saved: dict[str, list[FragmentEntry]] = defaultdict(list)
        for part in manifest.parts:
            for entry in part.fragments:
                saved[entry.name].append(entry)
        wanted: dict[str, list[tuple[Fragment, FragmentEntry]]] = defaultdict(list)
        for fragment in fragments:
            for entry in saved[fragment.name]:
                if entry.start < fragment.start + fragment.numel and fragment.start < entry.start + entry.numel:
                    wanted[entry.file].append((fragment, entry))
        for name, pairs in wanted.items():
            with safe_open(self._local(name), framework="pt") as file:
                for fragment, entry in pairs:
                    begin = max(fragment.start, entry.start)
                    end = min(fragment.start + fragment.numel, entry.start + entry.numel)
                    for kind in fragment.views:
                        tensor = file.get_slice(tensor_name(kind, entry.name, entry.start))
                        values = tensor[begin - entry.start : end - entry.start]
                        fragment.views[kind][begin - fragment.start : end - fragment.start].copy_(values)

    def verify(self, part: RankPart) -> None:
        """Raise TornCheckpoint unless the part's file is what the manifest says."""
        path = self._local(part.file.name)
        if not path.exists():
            raise TornCheckpoint(f"{part.file.name} is missing")
        size = path.stat().st_size
        if size != part.file.size_bytes:
            raise TornCheckpoint(f"{part.file.name} has {size} of {part.file.size_bytes} bytes")
        if file_sha256(path) != part.file.sha256:
            raise TornCheckpoint(f"{part.file.name} does not match its digest")

    def _local(self, name: str) -> Path:
        """The file as a local path, fetched once if the store is remote."""
        key = f"{self._folder}/{name}"
        path = self._store.local_path(key)
        if path is None:
            path = self._scratch / name
            if not path.exists():
                self._store.fetch(key, path)
        return path


def check_belongs(found: RunState, expected: RunState) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        TornCheckpoint: names what differs.
    """
    for field, what in (
        ("identity_sha256", "config (model, objective, optimizer, seed, steps, batch)"),
        ("corpus_fingerprint", "corpus"),
        ("shapes", "parameter shapes"),
        ("shared", "shared parameters"),
    ):
        if getattr(found, field) != getattr(expected, field):
            raise TornCheckpoint(f"it belongs to another {what}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _on_rank_0(function: Callable[[], T]) -> T:
    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]  # type: ignore[return-value]  # rank 0 filled it


def _gathered(value: str) -> list[str]:
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
