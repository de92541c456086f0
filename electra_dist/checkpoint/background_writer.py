"""Save checkpoints in the background: training waits only for a copy to host memory, which a thread then writes.

Guarantee: if any process is killed at any moment, the newest committed checkpoint in every target is complete. A
target is a store (a folder or a bucket) that receives every checkpoint. Each rank writes the file with its part of the
state once, then uploads that file to the other targets. `CheckpointWriter.on_commit` is called when all targets have
the checkpoint. A second thread then deletes old checkpoints; the next save may begin while it does.

Cost: one fp32 copy of the rank's state in host memory, pinned on GPU machines and reused by every save. At most one
save is in flight: the next one waits for it, and reports how long it waited.

Limits: a target that stays full or away for longer than `cluster.storage_patience_s` ends the run, once the other
targets have the checkpoint. To go on would leave the user with fewer copies than the config asks for, without notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from electra_dist.checkpoint.checkpoint import Checkpoint
from electra_dist.checkpoint.commit import is_older
from electra_dist.checkpoint.free_space import save_folders, shortage
from electra_dist.checkpoint.manifest import KINDS, RunState
from electra_dist.checkpoint.retention import HeldOutScore, retain
from electra_dist.checkpoint.save import Save
from electra_dist.checkpoint.tensor_file import Fragment, Tensor
from electra_dist.config import CheckpointConfig
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store
from electra_dist.store.local_store import LocalStore
from electra_dist.store.patience import Patience

_WAIT_SLICE_S = 1.0  # seconds between two calls of `on_wait`


@dataclass(frozen=True, kw_only=True)
class SaveTiming:
    """How long one save held up the training loop, in seconds."""

    wait_s: float  # until the previous save was finished
    stall_s: float  # for the copy to host memory


class CheckpointWriter:
    """Writer of one rank's part of every checkpoint. Call all methods from the training thread: they take no locks."""

    def __init__(
        self,
        targets: Sequence[Store],
        staging: Path,
        rank: int,
        attempt: int,
        policy: CheckpointConfig,
        rollback_steps: int = 0,
        patience: Patience | None = None,
        clears_staging: bool = True,
    ) -> None:
        """Take the stores (`targets`) that receive every checkpoint. Rank 0 also commits and deletes checkpoints.

        `policy` and `rollback_steps` decide which old ones are deleted (see `superfluous`). If no target is a local
        folder, a file is written to the folder `staging` before its upload. The ranks of a node share this folder. One
        of them, with `clears_staging`, deletes there the files of starts of the run before `attempt`. `patience`
        limits how long a save waits for targets that are full or away; None: no wait.
        """
        self._patience = Patience(0.0) if patience is None else patience
        self._targets = targets
        self._staging = LocalStore(staging)
        self._rank = rank
        self._policy = policy
        self._rollback_steps = rollback_steps
        self.on_commit: Callable[[RunState, SaveTiming, float], None] = lambda state, timing, seconds: None
        """Called on rank 0, in the writing thread, after each commit; `seconds` is the time since its save began."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called on rank 0, in the writing thread, before each commit; it may raise StoreAway, and is called again."""
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """Called about every second while `wait` waits, with the seconds waited so far."""
        self._buffer: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._deletion: threading.Thread | None = None  # of old checkpoints, on rank 0
        self._error: BaseException | None = None  # of the writing or the deleting thread, until `wait` raises it
        self._scores: list[dict[Checkpoint, HeldOutScore]] = [{} for _ in targets]  # on held-out rows, for `retain`
        if clears_staging:
            self._patience.call(lambda: self._clear_staging(attempt))

    def _clear_staging(self, attempt: int) -> None:
        for key in self._staging.list("step-"):
            if is_older(key, attempt):
                self._staging.delete(key)
        self._staging.discard_unfinished("step-", lambda key: is_older(key, attempt))

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
        self._thread = threading.Thread(target=self._run, args=(state, tensors, timing), name="checkpoint")
        self._thread.start()
        return timing

    def wait(self) -> None:
        """Wait until no save is in flight. If a save or a deletion has failed, raise its error (once).
        Success means on rank 0 that all targets have the checkpoint, and on other ranks that their own file is stored.
        The deletion of old checkpoints may still go on.
        """
        self._join(self._thread)
        self._thread = None
        self._raise_error()

    def _join(self, thread: threading.Thread | None) -> None:
        if thread is None:
            return
        begin = time.perf_counter()
        thread.join(_WAIT_SLICE_S)
        while thread.is_alive():
            self.on_wait(time.perf_counter() - begin)
            thread.join(_WAIT_SLICE_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    @property
    def has_failed(self) -> bool:
        """Return whether a save or a deletion has failed; the next call of `wait` raises the error."""
        return self._error is not None

    def close(self) -> None:
        """Wait for the last save and deletion, and free the host buffer. If one of the two failed, raise its error."""
        try:
            self.wait()
        finally:
            self._join(self._deletion)
            self._deletion = None
        self._raise_error()
        self._buffer = None

    def space_shortage(self, num_ranks: int, ranks_on_node: int) -> str:
        """Return a text about a disk with too little space for the next checkpoint; "" if all disks have enough.
        Call it on rank 0, after `reserve`. It assumes that every rank saves as much as this one.
        """
        assert self._buffer is not None
        own_bytes = self._buffer.numel() * self._buffer.element_size()
        staging = self._staging.local_path("checkpoint").parent
        folders = save_folders(self._targets, staging)
        num_writers = ranks_on_node if folders == [staging] else num_ranks
        return shortage(folders, own_bytes * num_writers)

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

    def _run(self, state: RunState, tensors: Sequence[Tensor], timing: SaveTiming) -> None:
        try:
            begin = time.perf_counter()
            self._store_everywhere(state, tensors)
            if self._rank == 0:
                self.on_commit(state, timing, time.perf_counter() - begin)
                self._start_deletion(state.attempt)
        except BaseException as error:  # noqa: BLE001  # the training thread raises it in wait()
            self._error = error

    def _store_everywhere(self, state: RunState, tensors: Sequence[Tensor]) -> None:
        """Store this rank's file in every target. Then rank 0 commits."""
        save = Save(self._rank, state, tensors, self._staging, self._targets)
        stages: list[Callable[[], Exception | None]] = [save.store]
        if self._rank == 0:
            stages += [lambda: _failure_of(self.before_commit), lambda: save.commit(self._must_give_up)]
        with self._patience.outage() as outage:
            while True:
                failure = _first_failure(stages)
                if failure is None:
                    break
                outage.wait_after(failure)
        save.delete_staged()

    def _must_give_up(self) -> bool:
        """Return whether the run is ending, so that a save must stop waiting for other ranks and targets."""
        return self._patience.is_abandoned

    def _start_deletion(self, attempt: int) -> None:
        if self._deletion is not None:
            self._deletion.join()
        self._deletion = threading.Thread(target=self._delete_old, args=(attempt,), name="checkpoint-deletion")
        self._deletion.start()

    def _delete_old(self, attempt: int) -> None:
        try:
            for target, scores in zip(self._targets, self._scores):
                self._patience.call(
                    lambda target=target, scores=scores: retain(  # type: ignore[misc]
                        target, self._policy, self._rollback_steps, attempt, scores
                    )
                )
        except BaseException as error:  # noqa: BLE001  # the training thread raises it
            self._error = error


def _first_failure(stages: Sequence[Callable[[], Exception | None]]) -> Exception | None:
    """Run the stages of a save in order; return the first failure that may pass, None if all succeed.
    If the first stage (storing) fails, the later stages still run for the targets that have the file. Any other
    failure ends the call, so that nothing is committed before `before_commit` has succeeded.
    """
    first_failure = None
    for stage in stages:
        failure = stage()
        if failure is None:
            continue
        if first_failure is None:
            first_failure = failure
        if stage is not stages[0]:
            break
    return first_failure


def _failure_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        if not is_worth_waiting_for(error):
            raise
        return error
    return None
