"""Save one checkpoint in several stores (targets) in three stages: store this rank's file, merge entries, commit.

Guarantee: every stage can be repeated after a failure, and then does only what is unfinished. A file is written
once on this node, and then copied to all other targets at the same time. An entry is submitted after its file is
complete. If a commit is repeated, a manifest that this process has created is recognised as its own.

Limits: a target that goes away after it has received the only written copy of this rank's file holds up the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.checkpoint.checkpoint_manifest import FileEntry, RunState, folder_name
from electra_dist.checkpoint.commit import ENTRY_TIMEOUT_S, commit
from electra_dist.checkpoint.free_space import nearest_folder
from electra_dist.checkpoint.many_ranks.file_entries import has_runs, merge_group, submit
from electra_dist.checkpoint.many_ranks.rank_groups import led_group
from electra_dist.checkpoint.tensor_file import Tensor, write_tensor_file
from electra_dist.errors import StoreAway
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.local_store import LocalStore

_HEADER_BYTES = 1 << 20  # allowed for the header of a tensor file, and for the manifest


@dataclass(kw_only=True)
class _Copy:
    """Progress of saving one checkpoint to one target. Each stage of the save sets its flag when it is done."""

    target: Store
    is_stored: bool = False  # this rank's file and its entry are there
    is_merged: bool = False  # the entries of the group of ranks are merged; set only if this rank leads a group
    was_tried: bool = False  # a commit was begun
    is_committed: bool = False


class Save:
    """Save of one checkpoint by one rank, to all targets.
    `store`, `merge` and `commit` return the first error that may pass, such as a full disk, so that the caller can
    wait and call them again; None means success. All other errors are raised.
    """

    def __init__(
        self, rank: int, state: RunState, tensors: Sequence[Tensor], staging: LocalStore, targets: Sequence[Store]
    ) -> None:
        self._rank = rank
        self._state = state
        self._tensors = tensors
        self._staging = staging
        self._folder = folder_name(state.step, state.attempt)
        self._key = f"{self._folder}/rank-{rank:05d}.safetensors"
        self._saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        copies = [_Copy(target=target) for target in targets]
        # The file is written into a local target, so that only one copy of it takes space on this node.
        self._copies = sorted(copies, key=lambda copy: copy.target.local_path(self._key) is None)
        self._written: tuple[Path, FileEntry] | None = None  # the file that was written, and its manifest entry

    def store(self) -> Exception | None:
        """Store this rank's file and manifest entry in every target that lacks them; return an error that may pass."""
        failures: list[Exception | None] = []
        for copy in self._copies:
            if self._written is not None:
                break  # The remaining targets receive copies of the written file, several at a time.
            failures.append(self._failure(self._store, copy))
        return self._for_each(self._store, failures)

    def merge(self, give_up: Callable[[], bool]) -> Exception | None:
        """If this rank leads a group, merge the group's manifest entries in every target that has this rank's file.
        While entries of other ranks are missing, `give_up` is called; if it returns True, TimeoutError is raised.
        """
        group = led_group(self._rank, self._state.world_size)
        if group is None:
            return None
        return self._for_each(lambda copy: self._merge(copy, group, give_up))

    def commit(self, give_up: Callable[[], bool]) -> Exception | None:
        """Commit the checkpoint on every target that has this rank's file and no manifest. Rank 0 only.
        `give_up` is as for `merge`.
        """
        return self._for_each(lambda copy: self._commit(copy, give_up))

    def delete_staged(self) -> None:
        """Delete this rank's file from the staging folder, if it is there; call it when all targets have the file."""
        if self._written is not None and self._written[0] == self._staging.local_path(self._key):
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
        """Store the file and its entry in one target; the first call writes the file, later ones upload copies."""
        if copy.is_stored:
            return
        path_in_target = copy.target.local_path(self._key)  # None for a target on S3
        if self._written is None:
            path = path_in_target or self._staging.local_path(self._key)
            _check_space(path, self._tensors)
            entry = write_tensor_file(path, self._tensors, digests_in_header=has_runs(self._state))
            self._written = (path, entry)
        written_path, entry = self._written
        if written_path != path_in_target:
            copy.target.upload(written_path, self._key)
        submit(copy.target, self._folder, self._rank, self._state, entry)
        copy.is_stored = True

    def _merge(self, copy: _Copy, group: int, give_up: Callable[[], bool]) -> None:
        if copy.is_merged or not copy.is_stored:
            return
        world_size = self._state.world_size
        merge_group(copy.target, self._folder, group, world_size, ENTRY_TIMEOUT_S, give_up)
        copy.is_merged = True

    def _commit(self, copy: _Copy, give_up: Callable[[], bool]) -> None:
        if copy.is_committed or not copy.is_stored:
            return
        is_repeated = copy.was_tried
        copy.was_tried = True
        commit(copy.target, self._state, self._saved_at, is_repeated=is_repeated, give_up=give_up)
        copy.is_committed = True


def _check_space(path: Path, tensors: Sequence[Tensor]) -> None:
    """Raise StoreAway if the disk is too full for the file, because a try would fill it for other users, too."""
    needed_bytes = sum(tensor.values.numel() * tensor.values.element_size() for tensor in tensors) + _HEADER_BYTES
    try:
        free_bytes = shutil.disk_usage(nearest_folder(path.parent)).free
    except OSError:
        return  # The write itself has the better message.
    if free_bytes < needed_bytes:
        raise StoreAway(
            f"{path}: disk full: {free_bytes / 1e6:.1f} MB free, {needed_bytes / 1e6:.1f} MB needed for this rank's "
            f"part of a checkpoint; free space there, or choose another path"
        )
