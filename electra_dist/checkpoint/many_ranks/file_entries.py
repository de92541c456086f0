"""Pass the manifest entries of all ranks' files to rank 0 through the store.

Each rank stores the entry of its file as an object. In a large run the leader of each group of ranks (rank_groups.py)
merges the entries of its group into one object, and rank 0 reads these, several at a time.
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

_POLL_S, _LONGEST_POLL_S = 0.02, 1.0


class Entries(BaseModel):
    """Manifest entries of the files of consecutive ranks.

    If the manifest is to hold runs (parameter_runs.py), the entries list no tensors, and `parts` has the parts of each
    parameter in these files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[FileEntry, ...]
    parts: dict[str, Parts] | None = None  # by parameter


def has_runs(state: RunState) -> bool:
    """Return whether the manifest of a checkpoint holds runs, and the header of each file its own list of tensors."""
    return is_too_long_a_list(state.zero_stage, len(state.shapes), state.world_size)


def entries_of_file(state: RunState, file: FileEntry) -> Entries:
    """Return the entries of one rank's file.

    Args:
        state: run state of the checkpoint.
        file: entry of the file, with all tensors.
    """
    if not has_runs(state):
        return Entries(files=(file,))
    starts: dict[str, int] = {}
    sizes = dict.fromkeys(state.shapes, 0)
    for tensor in file.tensors:
        if tensor.kind == "master":  # The moments are divided in the same way.
            starts[tensor.name] = min(tensor.start, starts.get(tensor.name, tensor.start))
            sizes[tensor.name] += tensor.numel
    parts = {name: Parts(starts.get(name), ((1, size),)) for name, size in sizes.items()}
    return Entries(files=(file.model_copy(update={"tensors": ()}),), parts=parts)


def merge(groups: Sequence[Entries]) -> Entries:
    """Return the entries of several groups of ranks, which follow one another, as those of a single group.

    Raises:
        TornCheckpoint: the parts of a parameter do not follow one another.
    """
    files = tuple(file for group in groups for file in group.files)
    parts_of_groups = [group.parts for group in groups if group.parts is not None]
    if not parts_of_groups:
        return Entries(files=files)
    names = parts_of_groups[0]
    return Entries(files=files, parts={name: join(name, [parts[name] for parts in parts_of_groups]) for name in names})


def submit(target: Store, folder: str, rank: int, state: RunState, file: FileEntry) -> None:
    """Store the manifest entry of a rank's tensor file as an object, which is deleted after the commit.

    Every rank calls it after its tensor file is complete in the target.

    Args:
        target: the store that holds the tensor file.
        folder: the checkpoint's folder in the store.
        rank: number of the calling process.
        state: run state of the checkpoint.
        file: the name, the size and all digests of the tensor file.
    """
    _write(target, entry_key(folder, rank, state.world_size), entries_of_file(state, file))


def merge_group(
    target: Store, folder: str, group: int, world_size: int, timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """Merge the entries of a group of ranks into one object, and delete them. Only the leader of the group calls it.

    It can be repeated after a failure.

    Args:
        target: the store; every rank of the group has submitted its entry, or is about to.
        folder: the checkpoint's folder in the store.
        group: number of the group.
        world_size: number of ranks of the run.
        timeout_s: how long to wait for the entries, in seconds.
        give_up: asked while the entries are waited for; True raises TimeoutError.

    Raises:
        TimeoutError: a rank stored no entry in time.
        StoreError: an entry cannot be read.
        TornCheckpoint: the parts of a parameter do not follow one another.
    """
    keys = keys_of_group(folder, group, world_size)
    if not target.exists(merged_key(folder, group)):
        wait_for(target, folder, group_prefix(folder, group), keys, timeout_s, give_up)
        _write(target, merged_key(folder, group), read_entries(target, keys))
    target.delete_all(keys)


def wait_for(
    target: Store, folder: str, prefix: str, keys: Sequence[str], timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """List a part of a checkpoint's folder again and again until all `keys` are there; the pause grows to 1 s.

    Args:
        target: the store.
        folder: the checkpoint's folder, for the message.
        prefix: what all keys begin with.
        keys: the objects to wait for.
        timeout_s: how long to wait, in seconds.
        give_up: asked after each listing; True raises TimeoutError.

    Raises:
        TimeoutError: a key is missing after `timeout_s`, or `give_up` returns True; the message names the first one.
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
    """Read entries, several at a time, verify the digest of each, and merge them.

    Raises:
        StoreError: an entry cannot be read.
        TornCheckpoint: the parts of a parameter do not follow one another.
    """
    return merge(in_parallel(lambda key: _read(target, key), keys))


def _write(target: Store, key: str, entries: Entries) -> None:
    """Store entries: the SHA-256 of the JSON on the first line, by which a reader notices a damaged read; the JSON."""
    data = entries.model_dump_json().encode()
    digest = hashlib.sha256(data).hexdigest().encode()
    target.write(key, digest + b"\n" + data)


def _read(target: Store, key: str) -> Entries:
    """Read an object of entries and verify its digest; if that does not match, the object is read again.

    Raises:
        StoreError: no reading matched the digest, or the object cannot be read.
    """

    def read_once() -> tuple[bytes, str]:
        """Return the JSON of the entries, and a fault if it does not match its digest."""
        digest, _, data = target.read(key, must_exist=True).partition(b"\n")  # first line, then the JSON
        found = hashlib.sha256(data).hexdigest()
        return data, "" if found.encode() == digest else f"it does not match its digest (found {found[:12]})"

    data, fault = Rereading(target.reread_pauses_s).read(f"{target.url}/{key}", read_once)
    if fault:
        raise StoreError(
            f"{target.url}/{key}: {fault}, at every reading; check the disk or the storage service, then start the "
            f"run again"
        )
    return Entries.model_validate(parse_json(data))
