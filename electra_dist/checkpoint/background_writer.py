"""Save checkpoints in the background: training waits only for a copy to host memory, which a thread then writes.

Guarantee: if any process is killed at any moment, the newest committed checkpoint in every target is complete. A
target is a store (a folder or a bucket) that receives every checkpoint. Each rank writes the file with its part of the
state once, then uploads that file to the other targets. `CheckpointWriter.on_commit` is called when all targets have
the checkpoint.

Cost: one fp32 copy of the rank's state in host memory, pinned on GPU machines and reused by every save. `reserve`
allocates it before the first save. `benchmarks/checkpoint.py` measures how long a save holds up training. At most one
save is in flight: the next one waits for it, and reports how long it waited.

Limits: a target that cannot be written ends the run. To go on would leave the user with fewer copies than the config
asks for, without notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from electra_dist.checkpoint.checkpoint_manifest import KINDS, RunState, folder_name
from electra_dist.checkpoint.commit import commit, is_older, retain, submit
from electra_dist.checkpoint.retention import HeldOutScore
from electra_dist.checkpoint.tensor_file import Fragment, Tensor, write_tensor_file
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store
from electra_dist.store.local_store import LocalStore


@dataclass(frozen=True, kw_only=True)
class SaveTiming:
    """How long one save held up the training loop, in seconds.

    The two parts are the wait for the previous save to finish, and the copy of the state to host memory.
    """

    wait_s: float  # until the previous save was finished
    stall_s: float  # for the copy to host memory


class CheckpointWriter:
    """Writer of checkpoints: `save` copies the training state to host memory, and a thread stores the copy.

    Every rank has one writer, which stores the part of the training state that this rank holds. The methods take no
    locks, so call all of them from the training thread. Call `close` at the end of the run; it waits for the last
    save.
    """

    def __init__(
        self,
        targets: Sequence[Store],
        staging: Path,
        rank: int,
        attempt: int,
        policy: CheckpointConfig,
        rollback_steps: int = 0,
    ) -> None:
        """Create the writer, and delete from `staging` the files that earlier starts of the run left there.

        Args:
            targets: the stores that every checkpoint is written to.
            staging: local folder in which a file is written before its upload; used only if no target is a local
                folder.
            rank: number of this process in the run; rank 0 also commits checkpoints and deletes old ones.
            attempt: number of this start of the run, from `begin_attempt`; every restart has a higher one.
            policy: the section `checkpoint` of the config, which decides what rank 0 keeps after each commit.
            rollback_steps: rank 0 also keeps the newest checkpoint that is at least this many steps older than the
                newest one, so that a rollback always has a checkpoint to go back to.
        """
        self._targets = targets
        self._staging = LocalStore(staging)
        self._rank = rank
        self._policy = policy
        self._rollback_steps = rollback_steps
        self.on_commit: Callable[[RunState, SaveTiming, float], None] = lambda state, timing, seconds: None
        """Called on rank 0, in the writing thread, after each commit; `seconds` is the time since its save began."""
        self._buffer: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # from the writing thread, until `wait` raises it
        self._scores: list[dict[str, HeldOutScore]] = [{} for _ in targets]  # on held-out rows, for `retain`
        for key in self._staging.list("step-"):
            if is_older(key, attempt):
                self._staging.delete(key)

    def reserve(self, fragments: Sequence[Fragment]) -> None:
        """Allocate the host buffer for `fragments` and write zeros to it, so that the first save is not slower.

        The operating system provides a memory page only when it is first written, which would slow the first save. The
        buffer takes 12 bytes for each parameter element: its fp32 master weight and two fp32 moments. If it has the
        right size already, nothing is done. Call it while no save is in flight.

        Args:
            fragments: the ranges of parameters that this rank saves; only their sizes matter.
        """
        num_values = sum(fragment.numel for fragment in fragments) * len(KINDS)
        if self._buffer is not None and self._buffer.numel() == num_values:
            return
        self._buffer = None  # frees the old buffer before the new one is allocated
        self._buffer = torch.empty(num_values, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        self._buffer.fill_(0)  # the operating system provides a page when it is first written

    def save(self, state: RunState, fragments: Sequence[Fragment]) -> SaveTiming:
        """Copy this rank's part of the training state to host memory, and start writing it in the background.

        Every rank calls it at the same step. It first waits for the previous save of this rank. When it returns, the
        caller may change the fragments, but the checkpoint does not exist yet: it does when `on_commit` is called on
        rank 0.

        Args:
            state: the part of the checkpoint that is not tensors, equal on all ranks.
            fragments: the ranges of parameters that this rank saves, with views of their values on any device.

        Returns:
            The seconds that the call waited for the previous save, and the seconds that the copy took.

        Raises:
            Exception: whatever the previous save raised in its thread, for example StoreError or Fenced.
        """
        wait_begin = time.perf_counter()
        self.wait()
        copy_begin = time.perf_counter()
        tensors = self._copy_to_host(fragments)
        copy_end = time.perf_counter()
        timing = SaveTiming(wait_s=copy_begin - wait_begin, stall_s=copy_end - copy_begin)
        self._thread = threading.Thread(target=self._run, args=(state, tensors, timing), name="checkpoint")
        self._thread.start()
        return timing

    def wait(self) -> None:
        """Wait until no save is in flight, then raise the error of the writing thread, if there was one.

        The same error is not raised again by the next call. If there was no error, then on rank 0 all targets have the
        checkpoint; on any other rank only that rank's own file is stored, and the checkpoint may not exist yet.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def close(self) -> None:
        """Wait for the last save, raise its error if there was one, and free the host buffer."""
        self.wait()
        self._buffer = None

    def _copy_to_host(self, fragments: Sequence[Fragment]) -> list[Tensor]:
        """Copy the fragments (this rank's ranges of parameters) into the host buffer; return parts of it as tensors.

        First come the master weights of all fragments, then all first moments, then all second moments; the thread
        writes them to the file in this order. When it returns, the caller may change the fragments.
        """
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

    def _run(self, state: RunState, tensors: Sequence[Tensor], timing: SaveTiming) -> None:
        """Run one save in the writing thread: store this rank's file and, on rank 0, commit the checkpoint.

        An error is not raised in the thread. It is kept, and `wait` raises it in the training thread.
        """
        try:
            begin = time.perf_counter()
            self._write(state, tensors)
            if self._rank == 0:
                self._commit_everywhere(state, timing, begin)
        except BaseException as error:  # noqa: BLE001  # the training thread raises it in wait()
            self._error = error

    def _commit_everywhere(self, state: RunState, timing: SaveTiming, begin: float) -> None:
        """Commit the checkpoint on every target, call `on_commit`, then delete old checkpoints. Rank 0 only.

        No old checkpoint is deleted before all targets have the new one.

        Args:
            state: the part of the checkpoint that is not tensors, such as its step.
            timing: how long this save held up training; passed to `on_commit`.
            begin: value of `time.perf_counter()` when the thread began this save; `on_commit` receives the seconds
                since.
        """
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        for target in self._targets:
            commit(target, state, saved_at)
        self.on_commit(state, timing, time.perf_counter() - begin)
        for target, scores in zip(self._targets, self._scores):
            retain(target, self._policy, self._rollback_steps, state.attempt, scores)

    def _write(self, state: RunState, tensors: Sequence[Tensor]) -> None:
        """Store this rank's tensor file in every target, and then the file's manifest entry (its size and digests).

        The tensor file is written only once: into the first target that is a local folder or, if no target is one,
        into the staging folder. From there it is uploaded to the other targets. A file in the staging folder is
        deleted afterwards.
        """
        folder = folder_name(state.step, state.attempt)
        key = f"{folder}/rank-{self._rank:05d}.safetensors"
        path_in_target = [target.local_path(key) for target in self._targets]  # None for a target on S3
        local_paths = [path for path in path_in_target if path is not None]
        written_path = local_paths[0] if local_paths else self._staging.local_path(key)
        entry = write_tensor_file(written_path, tensors)
        for target, path in zip(self._targets, path_in_target):
            has_file = path == written_path
            if not has_file:
                target.upload(written_path, key)
            submit(target, folder, self._rank, entry)
        if not local_paths:
            self._staging.delete(key)
