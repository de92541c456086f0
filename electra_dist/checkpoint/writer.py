"""Save checkpoints in the background: training waits only for a copy to host memory, which threads then store.

Guarantee: if any process is killed at any moment, the newest committed checkpoint in every target is complete. A
target is a store (a folder or a bucket) that receives every checkpoint. Each target is served by a thread of its own,
which stores this rank's file and, on rank 0, commits; so a target that is full or away holds up no other.
`CheckpointWriter.on_commit` is called when all targets have the checkpoint. Of the errors of several targets, `Fenced`
is raised first, because it says that this process must not write any more. Another thread then deletes old
checkpoints; the next save may begin while it does. An error of a deletion hides no error of a save.

Equal tensors give equal files. Their format is that of the safetensors library (8-byte little-endian header length,
JSON header, raw little-endian data), which can read the files. The library's own writer is not used, because it copies
the tensors, and because the name of the file, with the digest of the header, must be known before the file is written.
Under the key `sha256` of its `__metadata__`, the header holds the tensors' digests: one string with 64 hexadecimal
digits for each tensor, in their order. A tensor of more than `PIECE` elements is stored in pieces, each with its own
digest, which can only be checked over the whole range that it covers. With pieces, a rank that needs a part of a
tensor reads and hashes little more than that part.

Cost: one fp32 copy of the rank's state in host memory, pinned on GPU machines and reused by every save. At most one
save is in flight: the next one waits for it, and reports how long it waited.

Limits: a target that stays full or away for longer than `cluster.storage_patience_s` ends the run, once the other
targets have the checkpoint. To go on would leave the user with fewer copies than the config asks for, without notice.
The free space is compared without quotas, and without what other processes will write until the save.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import overload

import torch
from typing_extensions import override

from electra_dist.checkpoint.commit import Fenced, HeldOutScore, commit, retain
from electra_dist.checkpoint.manifest import KINDS, LENGTH_BYTES, FileEntry, Fragment, Kind, RunState
from electra_dist.checkpoint.stored_copies import Checkpoint
from electra_dist.config import CheckpointConfig
from electra_dist.store.atomic_files import nearest_folder
from electra_dist.store.interface import Store, in_parallel
from electra_dist.version import DEEPSPEED

PIECE = 1 << 22  # elements of fp32: 16 MiB
_WAIT_SLICE_S = 1.0  # seconds between two calls of `on_wait`


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Values to write to a tensor file: consecutive elements of a flattened parameter, or of one of its moments."""

    kind: Kind  # master weight, or first or second moment of the optimizer
    name: str  # of the parameter
    start: int  # element of the parameter at which `values` begins
    values: torch.Tensor  # 1-D, fp32, contiguous, on the CPU

    def pieces(self) -> list[Tensor]:
        """Cut the tensor into pieces of at most `PIECE` elements, in order, which share its memory."""
        return [
            Tensor(kind=self.kind, name=self.name, start=self.start + begin, values=self.values[begin : begin + PIECE])
            for begin in range(0, len(self.values), PIECE)
        ]


class TensorFile:
    """A rank's tensor file, ready to be written: a header with the digests of `tensors`, then these in their order."""

    def __init__(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Compute the digests; the tensors must not change before the file is stored."""
        self._pieces = [piece for tensor in tensors for piece in tensor.pieces()]
        self.header = _header(self._pieces)
        self.entry = FileEntry(
            rank=rank,
            size_bytes=len(self.header) + sum(4 * len(piece.values) for piece in self._pieces),
            header_bytes=len(self.header),
            header_sha256=hashlib.sha256(self.header).hexdigest(),
        )

    @property
    def pieces(self) -> list[bytes | memoryview]:
        """Return the bytes of the file in pieces, in their order: the header, and the memory of the tensors."""
        return [self.header, *map(_bytes_of, self._pieces)]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values, without a copy."""
    assert tensor.values.dtype == torch.float32
    assert tensor.values.is_contiguous()
    assert tensor.values.device.type == "cpu"
    return tensor.values.numpy().data.cast("B")


def _header(pieces: Sequence[Tensor]) -> bytes:
    """Return the header of a safetensors file that lists `pieces` as `KIND|PARAMETER|START`, with their digests.
    The JSON is padded to a multiple of 8 bytes, as the format asks, so that the data after it are aligned.
    """
    digests = "".join(hashlib.sha256(_bytes_of(piece)).hexdigest() for piece in pieces)
    table: dict[str, object] = {"__metadata__": {"sha256": digests}}
    offset = 0  # of a tensor's data, counted from the end of the header
    for piece in pieces:
        end = offset + 4 * len(piece.values)
        name = f"{piece.kind}|{piece.name}|{piece.start}"
        table[name] = {"dtype": "F32", "shape": [len(piece.values)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    num_spaces = -len(text) % 8  # up to the next multiple of 8
    text += b" " * num_spaces
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True, kw_only=True)
class SaveTiming:
    """How long one save held up the training loop, in seconds."""

    wait_s: float  # until the previous save was finished
    stall_s: float  # for the copy to host memory


class CheckpointWriter:
    """Writer of one rank's part of every checkpoint. Call all methods from the training thread: they take no locks."""

    def __init__(self, targets: Sequence[Store], rank: int, policy: CheckpointConfig, rollback_steps: int = 0) -> None:
        """Take the stores (`targets`) that receive every checkpoint. Rank 0 also commits and deletes checkpoints.
        `policy` and `rollback_steps` decide which old checkpoints are deleted, as `superfluous` explains.
        """
        self._targets = targets
        self._rank = rank
        self._policy = policy
        self._rollback_steps = rollback_steps
        self.on_commit: Callable[[RunState, SaveTiming, float], None] = lambda state, timing, seconds: None
        """Called on rank 0, in the writing thread, after each commit; `seconds` is the time since its save began."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called on rank 0 once in each save, by its thread, before any commit; it waits for its own storage."""
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """Called about every second while `wait` or `close` waits, with the seconds since a piece of a file was taken
        for its target or rank 0 has last looked for the files of the other ranks."""
        self._buffer: torch.Tensor | None = None
        self._save: _Task | None = None
        self._deletion: _Task | None = None  # of old checkpoints, on rank 0
        self._scores: dict[Checkpoint, HeldOutScore] = {}  # on held-out rows, for `retain`
        self._last_progress = 0.0  # of the save or deletion that goes on, by `time.monotonic`

    def reserve(self, fragments: Sequence[Fragment]) -> None:
        """Allocate the host buffer for `fragments` (12 bytes per element: fp32 master and two moments) and zero it.
        Without this call, the first save does the same and takes longer. Call it while no save is in flight.
        """
        num_values = sum(fragment.numel for fragment in fragments) * len(KINDS)
        if self._buffer is not None and self._buffer.numel() == num_values:
            return
        self._buffer = None  # frees the old buffer before the new one is allocated
        self._buffer = torch.empty(num_values, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        self._buffer.fill_(0)  # the operating system provides a page when it is first written

    def save(self, state: RunState, fragments: Sequence[Fragment]) -> SaveTiming:
        """Copy this rank's part of the training state to host memory, and start writing it in the background.
        Call it on every rank at the same step, with the same `state`. The call first waits for the previous save and
        raises the error of that save, if any. When it returns, the fragments may change again. The checkpoint exists
        once `on_commit` is called on rank 0.
        """
        wait_begin = time.perf_counter()
        self.wait()
        copy_begin = time.perf_counter()
        tensors = self._copy_to_host(fragments)
        copy_end = time.perf_counter()
        timing = SaveTiming(wait_s=copy_begin - wait_begin, stall_s=copy_end - copy_begin)
        self._note_progress()
        self._save = _Task(lambda: self._store(state, tensors, timing), "checkpoint")
        return timing

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()

    def _wait_for(self, task: _Task) -> None:
        while not task.join(_WAIT_SLICE_S):
            self.on_wait(time.monotonic() - self._last_progress)

    def wait(self) -> None:
        """Wait until no save is in flight. Raise the error of the last save or else of a deletion, each only once.
        If nothing is raised, rank 0 knows that all stores have the checkpoint, and any other rank that its own file
        is stored. The deletion of old checkpoints may still go on.
        """
        if self._save is not None:
            self._wait_for(self._save)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a save or deletion that has failed, once; do not wait for one that is still running."""
        for task in (self._save, self._deletion):
            if task is not None:
                task.raise_error()

    def close(self) -> None:
        """Wait for the last save and deletion, and free the host buffer; raise the error of one that has failed."""
        save = self._save
        self._save = None  # a second call raises nothing
        if save is not None:
            self._wait_for(save)
        deletion = self._deletion  # the end of the save may have begun it
        self._deletion = None
        if deletion is not None:
            self._wait_for(deletion)
        self._buffer = None
        for task in (save, deletion):
            if task is not None:
                task.raise_error()

    def space_shortage(self, num_ranks: int) -> str:
        """Return a line about a disk with too little space for the next checkpoint, or "" if all disks have enough.
        Call it on rank 0, after `reserve`. It assumes that every rank saves as much as this one.
        """
        assert self._buffer is not None
        paths = [target.local_path("checkpoint") for target in self._targets]
        folders = [path.parent for path in paths if path is not None]
        return _shortage(folders, self._buffer.numel() * self._buffer.element_size() * num_ranks)

    def _copy_to_host(self, fragments: Sequence[Fragment]) -> list[Tensor]:
        """Copy the fragments into the host buffer; return its parts: all weights, then first, then second moments."""
        self.reserve(fragments)
        assert self._buffer is not None
        tensors = []
        offset = 0
        for kind in KINDS:
            for fragment in fragments:
                host = self._buffer.narrow(0, offset, fragment.numel)
                host.copy_(fragment.views[kind], non_blocking=True)
                tensors.append(Tensor(kind=kind, name=fragment.name, start=fragment.start, values=host))
                offset += fragment.numel
        # Copies from a GPU into pinned memory are asynchronous.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tensors

    def _store(self, state: RunState, tensors: Sequence[Tensor], timing: SaveTiming) -> None:
        """Write this rank's file into every store; on rank 0, commit there as soon as all ranks' files are there."""
        begin = time.perf_counter()
        _check_parts(self._rank, state, tensors)
        file = TensorFile(self._rank, tensors)
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")

        if self._rank == 0:
            self.before_commit()

        def save_to(target: Store) -> None:
            pieces = _ReportedPieces(file.pieces, self._note_progress)
            target.write_pieces(Checkpoint(state.step, state.attempt, target).key(file.entry.name), pieces)
            if self._rank == 0:
                commit(target, state, saved_at, self._note_progress)

        _in_all(self._targets, save_to)
        if self._rank == 0:
            self.on_commit(state, timing, time.perf_counter() - begin)
            if self._deletion is not None:
                self._deletion.join()
                self._deletion.raise_error()
            self._deletion = _Task(lambda: self._delete_old(state.attempt), "checkpoint-deletion")

    def _delete_old(self, attempt: int) -> None:
        self._note_progress()

        def delete_in(target: Store) -> None:
            retain(target, self._policy, self._rollback_steps, attempt, self._scores)

        _in_all(self._targets, delete_in)  # a target that is away holds up no other


class _Task:
    """A thread that calls a function, and keeps its error until `raise_error` raises it, once."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name=name)
        self._thread.start()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  (`raise_error` raises it in the training thread)
            self.error = error

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s` seconds (None: without a limit); return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def raise_error(self) -> None:
        error = self.error
        self.error = None
        if error is not None:
            raise error


class _ReportedPieces(Sequence[bytes | memoryview]):
    """Sequence of the pieces of a file that calls `on_take` whenever a store takes one of them."""

    def __init__(self, pieces: Sequence[bytes | memoryview], on_take: Callable[[], None]) -> None:
        self._pieces = pieces
        self._on_take = on_take

    @override
    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, number: int) -> bytes | memoryview: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[bytes | memoryview]: ...
    @override
    def __getitem__(self, number: int | slice) -> bytes | memoryview | Sequence[bytes | memoryview]:
        self._on_take()
        return self._pieces[number]


def _in_all(targets: Sequence[Store], function: Callable[[Store], None]) -> None:
    """Call a function for all targets at once; of several errors, raise a `Fenced` first, else the first one."""

    def error_of(target: Store) -> Exception | None:
        try:
            function(target)
        except Exception as error:  # noqa: BLE001  (one of them is raised below)
            return error
        return None

    errors = [error for error in in_parallel(error_of, targets) if error is not None]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, Fenced))


def _check_parts(rank: int, state: RunState, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless the tensors are the ranges of parameters that readers expect of this rank's file."""
    held = {
        tensor.name: (tensor.start, tensor.start + len(tensor.values)) for tensor in tensors if tensor.kind == "master"
    }
    if state.is_divided_evenly and held != state.parts(rank):
        raise RuntimeError(
            f"rank {rank} holds other parts of the parameters than ZeRO stage {state.zero_stage} gives it; "
            f"install deepspeed=={DEEPSPEED}"
        )


def _shortage(folders: Sequence[Path], needed_bytes: int) -> str:
    """Return a line about a disk that has too little space for `needed_bytes` in each folder; "" if all have enough.
    The bytes of folders on one disk add up; the folders need not exist. A disk that does not answer is passed over,
    because the save will report it.
    """
    folders_by_disk: dict[int, list[Path]] = {}
    for folder in folders:
        try:
            device = nearest_folder(folder).stat().st_dev
        except OSError:
            continue
        folders_by_disk.setdefault(device, []).append(folder)
    for disk_folders in folders_by_disk.values():
        disk_needs_bytes = needed_bytes * len(disk_folders)
        try:
            disk = os.statvfs(nearest_folder(disk_folders[0]))
        except OSError:
            continue
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < disk_needs_bytes:
            return (
                f"the disk of {disk_folders[0]} has {free_bytes / 1e9:.3g} GB free, and a checkpoint needs "
                f"{disk_needs_bytes / 1e9:.3g} GB there"
            )
    return ""
