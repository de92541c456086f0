"""Saving: the step stalls for a copy to host memory; a thread per rank writes, hashes, uploads and commits.

Guarantee: kill any process at any moment, and the newest committed checkpoint of every target is whole (`commit.py`).
Each rank's file is written once, then uploaded to the targets that are not local folders; `on_commit` is called when
the last target has it.

Cost: one fp32 copy of the rank's state in (pinned, reused) host memory, whose pages are touched by `reserve` before
the first save; `benchmarks/checkpoint.py` measures the stall. At most one save is in flight; a second one waits for
it, and says how long.

Where it stops: a target that cannot be written ends the run, because a redundancy that is silently gone is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from electra_dist.checkpoint.commit import commit, is_older, retain, submit
from electra_dist.checkpoint.manifest import KINDS, RunState, folder_name
from electra_dist.checkpoint.tensor_file import Fragment, Tensor, write_tensor_file
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store
from electra_dist.store.local import LocalStore


@dataclass(frozen=True, kw_only=True)
class SaveTiming:
    """Seconds of one save that the training loop saw."""

    wait_s: float  # for the previous save
    stall_s: float  # for the copy to host memory


class CheckpointWriter:
    """One per rank; owns the host buffer and the writing thread. `close()` waits for the save in flight."""

    def __init__(
        self, targets: Sequence[Store], staging: Path, rank: int, attempt: int, policy: CheckpointConfig
    ) -> None:
        """Removes what dead attempts left in `staging`, the local folder of files on their way to targets."""
        self._targets, self._staging, self._rank, self._policy = targets, LocalStore(staging), rank, policy
        self.on_commit: Callable[[RunState, SaveTiming, float], None] = lambda state, timing, seconds: None
        """Told about each commit and the seconds since its save began, on rank 0's writing thread."""
        self._buffer: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._losses: list[dict[str, float | None]] = [{} for _ in targets]
        for key in self._staging.list("step-"):
            if is_older(key, attempt):
                self._staging.delete(key)

    def reserve(self, fragments: Sequence[Fragment]) -> None:
        """Allocate the host buffer and touch its pages now, so that the first save does not."""
        total = sum(f.numel for f in fragments) * len(KINDS)
        if self._buffer is None or self._buffer.numel() != total:
            self._buffer = None  # before the next one is there
            self._buffer = torch.empty(total, dtype=torch.float32, pin_memory=torch.cuda.is_available()).fill_(0)

    def save(self, state: RunState, fragments: Sequence[Fragment]) -> SaveTiming:
        """Copy the fragments and start writing them. Every rank calls it at the same step."""
        begin = time.perf_counter()
        self.wait()
        copied = time.perf_counter()
        tensors = self._copy_to_host(fragments)
        timing = SaveTiming(wait_s=copied - begin, stall_s=time.perf_counter() - copied)
        self._thread = threading.Thread(target=self._run, args=(state, tensors, timing), name="checkpoint")
        self._thread.start()
        return timing

    def wait(self) -> None:
        """Return when nothing is in flight; raise what the writing thread raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the last save; give the buffer back."""
        self.wait()
        self._buffer = None

    def _copy_to_host(self, fragments: Sequence[Fragment]) -> list[Tensor]:
        self.reserve(fragments)
        assert self._buffer is not None
        tensors, offset = [], 0
        for kind in KINDS:
            for f in fragments:
                host = self._buffer.narrow(0, offset, f.numel)
                host.copy_(f.views[kind], non_blocking=True)
                tensors.append(Tensor(kind=kind, name=f.name, start=f.start, values=host))
                offset += f.numel
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tensors

    def _run(self, state: RunState, tensors: Sequence[Tensor], timing: SaveTiming) -> None:
        try:
            begin = time.perf_counter()
            self._write(state, tensors)
            if self._rank == 0:
                saved_at = datetime.now(UTC).isoformat(timespec="seconds")
                for target in self._targets:
                    commit(target, state, saved_at)
                self.on_commit(state, timing, time.perf_counter() - begin)
                for target, losses in zip(self._targets, self._losses):
                    retain(target, self._policy, state.attempt, losses)
        except BaseException as error:  # noqa: BLE001  # handed to the training thread, which raises it in wait()
            self._error = error

    def _write(self, state: RunState, tensors: Sequence[Tensor]) -> None:
        """This rank's file and entry, in every target."""
        folder = folder_name(state.step, state.attempt)
        name = f"rank-{self._rank:05d}.safetensors"
        key = f"{folder}/{name}"
        places = [target.local_path(key) for target in self._targets]
        direct = next((place for place in places if place is not None), None)
        path = direct or self._staging.local_path(key)
        entry = write_tensor_file(path, tensors)
        for target, place in zip(self._targets, places):
            if direct is None or place != direct:
                target.upload(path, key)
            submit(target, folder, self._rank, entry)
        if direct is None:
            self._staging.delete(key)
