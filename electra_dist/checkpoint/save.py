"""Saving: the step stalls for a copy to host memory; a thread per rank writes, hashes, uploads and commits.

Guarantee: a checkpoint is committed by one conditional create of its manifest, after every rank's file and part are in
the store, and only by the newest attempt of the run (fencing): a rank that lived on behind a cut link cannot commit
over its successor. Kill any process at any moment and the newest committed checkpoint is whole.

Cost: one fp32 copy of the rank's state in (pinned, reused) host memory. At most one save is in flight; a second one
waits for it, and says how long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from electra_dist.checkpoint.fragments import KINDS, Fragment
from electra_dist.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    FragmentEntry,
    Manifest,
    RankPart,
    RunState,
    committed,
    folder_name,
)
from electra_dist.checkpoint.tensor_file import write_tensor_file
from electra_dist.store import Store

PART_TIMEOUT_S = 1800.0
_POLL_S = 0.05


class Fenced(RuntimeError):
    """A newer attempt of this run has started: this one must end without committing anything."""


@dataclass(frozen=True, kw_only=True)
class SaveTiming:
    """Seconds of one save that the training loop saw."""

    wait_s: float  # for the previous save
    stall_s: float  # for the copy to host memory


def begin_attempt(store: Store) -> int:
    """Take the next attempt number of the run, for this process group alone. Called by rank 0 only."""
    attempt = 1 + max((int(Path(key).stem) for key in store.list("attempts/")), default=0)
    while not store.write_new(_attempt_key(attempt), b"{}\n"):
        attempt += 1
    return attempt


def tensor_name(kind: str, name: str, start: int) -> str:
    """Name of a fragment's tensor in a rank's file."""
    return f"{kind}|{name}|{start}"


class CheckpointWriter:
    """One per rank; owns the host buffer and the writing thread. `close()` waits for the save in flight."""

    def __init__(self, store: Store, staging: Path, rank: int, keep_last: int) -> None:
        """`staging`: local folder for files on their way to S3."""
        self._store, self._staging, self._rank, self._keep_last = store, staging, rank, keep_last
        self.on_commit: Callable[[RunState, float], None] = lambda state, seconds: None
        """Told about each commit and the seconds since its save began, on rank 0's writing thread."""
        self._buffer: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: RunState, fragments: Sequence[Fragment]) -> SaveTiming:
        """Copy the fragments and start writing them. Every rank calls it at the same step."""
        begin = time.perf_counter()
        self.wait()
        copied = time.perf_counter()
        tensors = self._copy_to_host(fragments)
        entries = [(f.name, f.start, f.numel) for f in fragments]
        self._thread = threading.Thread(target=self._run, args=(state, entries, tensors), name="checkpoint")
        self._thread.start()
        return SaveTiming(wait_s=copied - begin, stall_s=time.perf_counter() - copied)

    def wait(self) -> None:
        """Return when nothing is in flight; raise what the writing thread raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the last save."""
        self.wait()

    def _copy_to_host(self, fragments: Sequence[Fragment]) -> dict[str, torch.Tensor]:
        total = sum(f.numel for f in fragments) * len(KINDS)
        if self._buffer is None or self._buffer.numel() != total:
            self._buffer = torch.empty(total, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        tensors, offset = {}, 0
        for f in fragments:
            for kind in KINDS:
                host = self._buffer.narrow(0, offset, f.numel)
                host.copy_(f.views[kind], non_blocking=True)
                tensors[tensor_name(kind, f.name, f.start)] = host
                offset += f.numel
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tensors

    def _run(self, state: RunState, entries: list[tuple[str, int, int]], tensors: dict[str, torch.Tensor]) -> None:
        try:
            begin = time.perf_counter()
            folder = folder_name(state.step, state.attempt)
            self._write_part(folder, entries, tensors)
            if self._rank == 0:
                self._commit(folder, state)
                self.on_commit(state, time.perf_counter() - begin)
                retain(self._store, self._keep_last, state.attempt)
        except BaseException as error:  # noqa: BLE001  # handed to the training thread, which raises it in wait()
            self._error = error

    def _write_part(self, folder: str, entries: list[tuple[str, int, int]], tensors: dict[str, torch.Tensor]) -> None:
        name = f"rank-{self._rank:05d}.safetensors"
        key = f"{folder}/{name}"
        direct = self._store.local_path(key)
        path = direct or self._staging / f"{folder}-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        size, sha256 = write_tensor_file(path, tensors)
        if direct is None:
            self._store.upload(path, key)
            path.unlink()
        part = RankPart(
            rank=self._rank,
            file=FileEntry(name=name, size_bytes=size, sha256=sha256),
            fragments=tuple(FragmentEntry(name=n, start=s, numel=k, file=name) for n, s, k in entries),
        )
        self._store.write(_part_key(folder, self._rank), part.model_dump_json().encode())

    def _commit(self, folder: str, state: RunState) -> None:
        deadline = time.monotonic() + PART_TIMEOUT_S
        for rank in range(state.world_size):
            while not self._store.exists(_part_key(folder, rank)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"checkpoint {folder}: no part of rank {rank} after {PART_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)
        parts = [RankPart.model_validate_json(self._store.read(_part_key(folder, r))) for r in range(state.world_size)]
        manifest = Manifest(state=state, parts=tuple(parts))
        manifest.check_coverage()
        if self._store.exists(_attempt_key(state.attempt + 1)):
            raise Fenced(f"attempt {state.attempt} was succeeded; checkpoint {folder} is not committed")
        if not self._store.write_new(f"{folder}/{MANIFEST}", manifest.model_dump_json().encode()):
            raise Fenced(f"checkpoint {folder} was committed by somebody else")


def retain(store: Store, keep_last: int, attempt: int) -> None:
    """Delete all but the newest `keep_last` committed checkpoints, and what dead attempts left uncommitted.

    A checkpoint loses its manifest first, so that a kill in between leaves a leftover, not a torn checkpoint. What was
    set aside stays.
    """
    doomed = {folder for _, _, folder in committed(store)[:-keep_last]}
    kept = {folder for _, _, folder in committed(store)[-keep_last:]}
    kept |= {folder for _, _, folder in committed(store, "set-aside.txt")}
    for folder in doomed:
        store.delete(f"{folder}/{MANIFEST}")
    for key in store.list("step-"):
        folder = key.partition("/")[0]
        if folder not in kept and (folder in doomed or int(folder.rpartition("-a")[2]) < attempt):
            store.delete(key)


def _part_key(folder: str, rank: int) -> str:
    return f"{folder}/rank-{rank:05d}.json"


def _attempt_key(attempt: int) -> str:
    return f"attempts/{attempt:04d}.json"
