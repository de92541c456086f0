"""Save one checkpoint in several stores (targets) in two stages: store this rank's file, and commit.

Guarantee: every stage can be repeated after a failure, and then does only what is unfinished. A file is written
once on this node, and then copied to all other targets at the same time.

Limits: a target that goes away after it has received the only written copy of this rank's file holds up the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.checkpoint.checkpoint import Checkpoint
from electra_dist.checkpoint.commit import commit
from electra_dist.checkpoint.free_space import nearest_folder
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.tensor_file import Tensor, TensorFile
from electra_dist.errors import StoreAway
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.local_store import LocalStore
from electra_dist.version import DEEPSPEED

_MANIFEST_BYTES = 1 << 20  # allowed for the manifest, which is smaller


@dataclass(kw_only=True)
class _Copy:
    """Progress of saving one checkpoint to one target. Each stage of the save sets its flag when it is done."""

    target: Store
    is_stored: bool = False  # this rank's file is there
    is_committed: bool = False


class Save:
    """Save of one checkpoint by one rank, to all targets.
    `store` and `commit` return the first error that may pass, such as a full disk, so that the caller can
    wait and call them again; None means success. All other errors are raised.
    """

    def __init__(
        self, rank: int, state: RunState, tensors: Sequence[Tensor], staging: LocalStore, targets: Sequence[Store]
    ) -> None:
        stored_ranges = {
            tensor.name: (tensor.start, tensor.start + len(tensor.values))
            for tensor in tensors
            if tensor.kind == "master"
        }
        if state.is_divided_evenly and stored_ranges != state.parts(rank):
            raise RuntimeError(
                f"rank {rank} holds other parts of the parameters than ZeRO stage {state.zero_stage} gives it; "
                f"install deepspeed=={DEEPSPEED}"
            )
        self._state = state
        self._file = TensorFile(rank, tensors)
        self._staging = staging
        self._key = Checkpoint(state.step, state.attempt, staging).key(self._file.entry.name)
        self._saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        copies = [_Copy(target=target) for target in targets]
        # The file is written into a local target, so that only one copy of it takes space on this node.
        self._copies = sorted(copies, key=lambda copy: copy.target.local_path(self._key) is None)
        self._written: Path | None = None  # the file that was written

    def store(self) -> Exception | None:
        """Store this rank's file in every target that lacks it; return an error that may pass."""
        failures: list[Exception | None] = []
        for copy in self._copies:
            if self._written is not None:
                break  # The remaining targets receive copies of the written file, several at a time.
            failures.append(self._failure(self._store, copy))
        return self._for_each(self._store, failures)

    def commit(self, give_up: Callable[[], bool]) -> Exception | None:
        """Commit the checkpoint on every target that has this rank's file and no manifest. Rank 0 only.
        While files of other ranks are missing, `give_up` is called; if it returns True, TimeoutError is raised.
        """
        return self._for_each(lambda copy: self._commit(copy, give_up))

    def delete_staged(self) -> None:
        """Delete this rank's file from the staging folder, if it is there; call it when all targets have the file."""
        if self._written is not None and self._written == self._staging.local_path(self._key):
            self._staging.delete(self._key)

    def _for_each(self, stage: Callable[[_Copy], None], failures: Sequence[Exception | None] = ()) -> Exception | None:
        """Run a stage for the targets for which `failures` has no result yet; return the first failure of all."""
        remaining_copies = self._copies[len(failures) :]
        results = [*failures, *in_parallel(lambda copy: self._failure(stage, copy), remaining_copies)]
        return next((failure for failure in results if failure is not None), None)

    def _failure(self, stage: Callable[[_Copy], None], copy: _Copy) -> Exception | None:
        try:
            stage(copy)
        except Exception as error:
            if not is_worth_waiting_for(error):
                raise
            return error
        return None

    def _store(self, copy: _Copy) -> None:
        """Store the file in one target; the first call writes the file, later ones upload copies."""
        if copy.is_stored:
            return
        path_in_target = copy.target.local_path(self._key)  # None for a target on S3
        if self._written is None:
            path = path_in_target or self._staging.local_path(self._key)
            _check_space(path, self._file.entry.size_bytes)
            self._file.write(path)
            self._written = path
        if self._written != path_in_target:
            copy.target.upload(self._written, self._key)
        copy.is_stored = True

    def _commit(self, copy: _Copy, give_up: Callable[[], bool]) -> None:
        if copy.is_committed or not copy.is_stored:
            return
        commit(copy.target, self._state, self._saved_at, give_up)
        copy.is_committed = True


def _check_space(path: Path, file_bytes: int) -> None:
    """Raise StoreAway if the disk is too full for the file, because a try would fill it for other users, too."""
    needed_bytes = file_bytes + _MANIFEST_BYTES
    try:
        free_bytes = shutil.disk_usage(nearest_folder(path.parent)).free
    except OSError:
        return  # The write itself has the better message.
    if free_bytes < needed_bytes:
        raise StoreAway(
            f"{path}: disk full: {free_bytes / 1e6:.1f} MB free, {needed_bytes / 1e6:.1f} MB needed for this rank's "
            f"part of a checkpoint; free space there, or choose another path"
        )
