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
    """Manifest entries of the tensor files of consecutive ranks, as ranks store them for rank 0.

    For a manifest of format 2 the entries list all tensors. For format 3 they list none: `parts` then describes
    with a run-length code (parameter_runs.py) how each parameter is divided between these files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[FileEntry, ...]  # in the order of the ranks
    parts: dict[str, Parts] | None = None  # by name of the parameter; None for a manifest of format 2


def has_runs(state: RunState) -> bool:
    """Return whether the manifest of a checkpoint has format 3, where only the header of a file lists its tensors."""
    return is_too_long_a_list(state.zero_stage, len(state.shapes), state.world_size)


def entries_of_file(state: RunState, file: FileEntry) -> Entries:
    """Return the object that a rank stores for rank 0: the entry of its tensor file, in the form the manifest
    needs.
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
    """Merge the entries of several groups of ranks into the entries of all their ranks."""
    files = tuple(file for group in groups for file in group.files)
    parts_of_groups = [group.parts for group in groups if group.parts is not None]
    if not parts_of_groups:
        return Entries(files=files)
    names = parts_of_groups[0]
    return Entries(files=files, parts={name: join(name, [parts[name] for parts in parts_of_groups]) for name in names})


def submit(target: Store, folder: str, rank: int, state: RunState, file: FileEntry) -> None:
    """Store the manifest entry of a rank's tensor file as an object, from which rank 0 builds the manifest."""
    _write(target, entry_key(folder, rank, state.world_size), entries_of_file(state, file))


def merge_group(
    target: Store, folder: str, group: int, world_size: int, timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """Wait for the entries of a group's ranks, merge them into one object, and delete the single entries.

    Args:
        timeout_s: how long to wait for the entries, in seconds.
    """
    keys = keys_of_group(folder, group, world_size)
    if not target.exists(merged_key(folder, group)):
        wait_for(target, folder, group_prefix(folder, group), keys, timeout_s, give_up)
        _write(target, merged_key(folder, group), read_entries(target, keys))
    target.delete_all(keys)


def wait_for(
    target: Store, folder: str, prefix: str, keys: Sequence[str], timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """Wait until a store holds all the objects `keys`, by listing the keys that begin with `prefix` repeatedly.

    Args:
        timeout_s: how long to wait, in seconds.
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
    """Read objects of entries, up to 16 at a time, verify the digest of each object, and merge the entries."""
    return merge(in_parallel(lambda key: _read(target, key), keys))


def _write(target: Store, key: str, entries: Entries) -> None:
    """Write entries to an object: on the first line the SHA-256 of the rest (hexadecimal), then the entries as
    JSON.
    """
    data = entries.model_dump_json().encode()
    digest = hashlib.sha256(data).hexdigest().encode()
    target.write(key, digest + b"\n" + data)


def _read(target: Store, key: str) -> Entries:
    """Read entries that `_write` has written, and verify their digest; after a mismatch the object is read again."""

    def read_once() -> tuple[bytes, str]:
        """Return the JSON of the entries, and a fault if the JSON does not match its digest; "" if it does."""
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
