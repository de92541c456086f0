"""Pass the manifest entries of all ranks' tensor files to rank 0 through the store.

Each rank stores the entry of its tensor file as an object. In a run with more than 16 ranks, the leader of each group
of ranks (rank_groups.py) merges the entries of its group into one object. Rank 0 then reads the merged objects, up to
16 at a time, instead of one object per rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict

from electra_dist.checkpoint.checkpoint_manifest import FileEntry, RunState
from electra_dist.checkpoint.many_ranks.parameter_runs import Parts, is_too_long_a_list, join
from electra_dist.checkpoint.many_ranks.rank_groups import entry_key, group_prefix, keys_of_group, merged_key
from electra_dist.errors import StoreError
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.json_file import parse_json
from electra_dist.store.retry import Rereading

_POLL_S = 0.02  # first pause between two listings; it doubles with each
_LONGEST_POLL_S = 1.0


class Entries(BaseModel):
    """Manifest entries of the tensor files of consecutive ranks, as ranks store them for rank 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[FileEntry, ...]  # in the order of the ranks
    parts: dict[str, Parts] | None = None  # by name of the parameter; None for a manifest of format 2


def has_runs(state: RunState) -> bool:
    """Return whether a run has too many tensors for a manifest, so that the file headers list them (format 3)."""
    return is_too_long_a_list(state.zero_stage, len(state.shapes), state.world_size)


def entries_of_file(state: RunState, file: FileEntry) -> Entries:
    """Return the manifest entry of a rank's file in the form that rank 0 reads.
    In format 3, a range of each parameter replaces the list of tensors, so a parameter's tensors must be adjacent.
    """
    if not has_runs(state):
        return Entries(files=(file,))
    starts: dict[str, int] = {}  # first element of the rank's part of each parameter, if the part is not empty
    sizes = dict.fromkeys(state.shapes, 0)  # elements of the part
    for tensor in file.tensors:
        if tensor.kind == "master":  # The moments are divided in the same way.
            starts[tensor.name] = min(tensor.start, starts.get(tensor.name, tensor.start))
            sizes[tensor.name] += tensor.numel
    parts = {name: Parts(starts.get(name), ((1, size),)) for name, size in sizes.items()}
    file_without_tensors = file.model_copy(update={"tensors": ()})
    return Entries(files=(file_without_tensors,), parts=parts)


def merge(groups: Sequence[Entries]) -> Entries:
    """Merge the entries of consecutive groups of ranks, all of one manifest format.
    Raises TornCheckpoint if a parameter's elements in one group do not begin where those of the previous group end.
    """
    files = tuple(file for group in groups for file in group.files)
    parts_of_groups = [group.parts for group in groups if group.parts is not None]
    if not parts_of_groups:
        return Entries(files=files)
    names = parts_of_groups[0]
    return Entries(files=files, parts={name: join(name, [parts[name] for parts in parts_of_groups]) for name in names})


def submit(target: Store, folder: str, rank: int, state: RunState, file: FileEntry) -> None:
    """Store the manifest entry of a rank's tensor file for rank 0; call it when the file is complete in the target.
    The object is deleted after the commit or, in a run with groups, after the merge.
    """
    _write(target, entry_key(folder, rank, state.world_size), entries_of_file(state, file))


def merge_group(
    target: Store, folder: str, group: int, world_size: int, timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """Wait for the manifest entries of a group's ranks, merge them into one object, and delete the single ones.
    For the group's leader only, who may call it again after a failure. Raises TimeoutError as `wait_for` does.
    """
    keys = keys_of_group(folder, group, world_size)
    if not target.exists(merged_key(folder, group)):
        wait_for(target, folder, group_prefix(folder, group), keys, timeout_s, give_up)
        _write(target, merged_key(folder, group), read_entries(target, keys))
    target.delete_all(keys)


def wait_for(
    target: Store, folder: str, prefix: str, keys: Sequence[str], timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """Wait until a store holds all objects `keys`, by listing `prefix` with pauses that double from 0.02 to 1 second.
    Raises TimeoutError after `timeout_s`, or if `give_up` returns True while a key is missing.
    """
    deadline = time.monotonic() + timeout_s
    poll_s = _POLL_S
    while True:
        missing_keys = set(keys) - set(target.list(prefix))
        if not missing_keys:
            return
        if time.monotonic() > deadline or give_up():
            name = PurePosixPath(min(missing_keys)).name
            raise TimeoutError(
                f"checkpoint {target.url}/{folder} was not committed: its file {name} was not written within "
                f"{timeout_s:.0f} s, or before the run ended; look for the error of that rank in the output"
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def read_entries(target: Store, keys: Sequence[str]) -> Entries:
    """Read, verify and merge the entries stored under `keys` (in the order of the ranks), up to 16 at a time."""
    return merge(in_parallel(lambda key: _read(target, key), keys))


def _write(target: Store, key: str, entries: Entries) -> None:
    """Write entries as JSON, after a line with the JSON's SHA-256, which `_read` compares."""
    data = entries.model_dump_json().encode()
    digest = hashlib.sha256(data).hexdigest().encode()
    target.write(key, digest + b"\n" + data)


def _read(target: Store, key: str) -> Entries:
    def read_once() -> tuple[bytes, str]:
        digest, _, data = target.read(key, must_exist=True).partition(b"\n")  # first line, then the JSON
        found_digest = hashlib.sha256(data).hexdigest()
        if found_digest.encode() == digest:
            return data, ""
        return data, f"it does not match its digest (found {found_digest[:12]})"

    data, fault = Rereading(target.reread_pauses_s).read(f"{target.url}/{key}", read_once)
    if fault:
        raise StoreError(
            f"{target.url}/{key}: {fault}, at every reading; check the disk or the storage service, then start the "
            f"run again"
        )
    return Entries.model_validate(parse_json(data))
