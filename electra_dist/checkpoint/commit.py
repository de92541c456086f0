"""The commit protocol of one target: attempts, entries, manifest, what is deleted when. Rank 0 only, but for `submit`.

Guarantee: of a run's starts ("attempts") only the newest deletes anything, and an older one that notices ends with
`Fenced`. A checkpoint is committed by one conditional create, after every rank's file and entry are there. It loses
its manifest before its files, so a kill in between leaves a leftover and not a torn checkpoint.

How it is safe without a lock: an attempt first takes its number, then sweeps what older ones left uncommitted. An
older one that lives on behind a cut link looks for newer numbers before its commit, and again before it deletes
anything. If it commits between the two, its files may have been swept; that checkpoint is found torn at the next load,
and nothing was deleted for it.

Cost: a commit is W + 4 requests, a start is 5.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

from electra_dist.checkpoint.manifest import (
    MANIFEST,
    READINGS,
    SET_ASIDE,
    FileEntry,
    Manifest,
    RunState,
    committed,
    folder_name,
    parse_folder,
    read_manifest,
)
from electra_dist.checkpoint.retention import CheckpointInfo, superfluous
from electra_dist.config import CheckpointConfig, canonical_json
from electra_dist.errors import StoreError, TornCheckpoint, UserError
from electra_dist.store.interface import Store

ENTRY_TIMEOUT_S = 1800.0
_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_ATTEMPTS = "attempts/"


class Fenced(RuntimeError):
    """A newer attempt of this run has started: this one must end without committing anything."""


def begin_attempt(targets: Sequence[Store], run: dict[str, str]) -> int:
    """Take the run's next attempt number on all targets, for this process group alone; sweep what dead ones left.

    Args:
        run: what identifies the run; a target that holds another one is refused.

    Raises:
        UserError: a target is another run's, or cannot be written.
    """
    document = canonical_json(run).encode() + b"\n"
    attempt = 1
    for target in targets:
        if newest := newest_attempt(target):
            attempt = max(attempt, newest + 1)
            if target.read(_attempt_key(newest)) != document:
                raise UserError(
                    f"{target.url} holds checkpoints of another run (another config or corpus); "
                    f"give checkpoint.targets a folder of this run's own"
                )
    while not all(target.write_new(_attempt_key(attempt), document) for target in targets):
        attempt += 1
    for target in targets:
        sweep(target, attempt)
    return attempt


def newest_attempt(target: Store) -> int:
    """The newest attempt's number; 0 before the first."""
    return max((int(PurePosixPath(key).stem) for key in target.list(_ATTEMPTS)), default=0)


def leftovers(target: Store, attempt: int) -> list[str]:
    """Keys that no checkpoint needs: entries of committed ones, and all that attempts before `attempt` left."""
    keys = target.list("step-")
    finished = {key.partition("/")[0] for key in keys if key.endswith((f"/{MANIFEST}", f"/{SET_ASIDE}"))}
    found = []
    for key in keys:
        folder, _, name = key.partition("/")
        if _is_entry(name) if folder in finished else is_older(key, attempt):
            found.append(key)
    return found


def sweep(target: Store, attempt: int) -> list[str]:
    """Delete the leftovers; returns them."""
    found = leftovers(target, attempt)
    for key in found:
        target.delete(key)
    target.discard_unfinished("step-", lambda key: is_older(key, attempt))
    return found


def is_older(key: str, attempt: int) -> bool:
    """Whether a key is of an attempt before `attempt`."""
    place = parse_folder(key.partition("/")[0])
    return place is not None and place[1] < attempt


def submit(target: Store, folder: str, rank: int, entry: FileEntry) -> None:
    """Every rank, when its file is in the target."""
    data = entry.model_dump_json().encode()
    target.write(_entry_key(folder, rank), hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def commit(target: Store, state: RunState, saved_at: str) -> None:
    """Wait for all ranks' entries and create the manifest.

    Raises:
        Fenced: a newer attempt exists.
        TimeoutError: a rank did not submit.
        StoreError: an entry cannot be read.
    """
    folder = folder_name(state.step, state.attempt)
    keys = [_entry_key(folder, rank) for rank in range(state.world_size)]
    _wait_for(target, folder, keys)
    files = tuple(_read_entry(target, key) for key in keys)
    manifest = Manifest(saved_at=saved_at, state=state, files=files)
    manifest.check_coverage()
    check_fence(target, state.attempt)
    if not target.write_new(f"{folder}/{MANIFEST}", manifest.dump()):
        raise Fenced(f"checkpoint {folder} was committed by somebody else")
    check_fence(target, state.attempt)
    for key in keys:
        target.delete(key)


def check_fence(target: Store, attempt: int) -> None:
    """Raise Fenced if a newer attempt of the run has started."""
    if (newest := newest_attempt(target)) > attempt:
        raise Fenced(f"attempt {attempt} of the run was succeeded by attempt {newest}; it ends")


def retain(target: Store, policy: CheckpointConfig, attempt: int, losses: dict[str, float | None]) -> None:
    """Delete the checkpoints that the policy does not keep. What was set aside stays.

    Args:
        losses: folder -> held-out loss; what is already known, completed here.
    """
    checkpoints = []
    for step, saver, folder in committed(target):
        if policy.keep_best and folder not in losses:
            losses[folder] = _held_out_loss(target, folder)
        checkpoints.append(CheckpointInfo(step, saver, folder, losses.get(folder)))
    check_fence(target, attempt)
    for checkpoint in superfluous(checkpoints, policy):
        target.delete(f"{checkpoint.folder}/{MANIFEST}")
        for key in target.list(f"{checkpoint.folder}/"):
            target.delete(key)


def _held_out_loss(target: Store, folder: str) -> float | None:
    try:
        return read_manifest(target, folder).state.eval_rtd_loss
    except (TornCheckpoint, StoreError):
        return None


def _wait_for(target: Store, folder: str, keys: Sequence[str]) -> None:
    deadline, poll_s = time.monotonic() + ENTRY_TIMEOUT_S, _POLL_S
    while missing := set(keys) - set(target.list(f"{folder}/")):
        if time.monotonic() > deadline:
            name = min(missing).rpartition("/")[2]
            raise TimeoutError(f"checkpoint {folder}: no {name} in {target.url} after {ENTRY_TIMEOUT_S:.0f} s")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _read_entry(target: Store, key: str) -> FileEntry:
    """What `submit` wrote: a digest on the first line, then the entry."""
    for _ in range(READINGS):
        digest, _, data = target.read(key, must_exist=True).partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() == digest:
            return FileEntry.model_validate_json(data)
    raise StoreError(f"{target.url}/{key}: comes out damaged again and again; check the storage service")


def _is_entry(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".json")


def _entry_key(folder: str, rank: int) -> str:
    return f"{folder}/rank-{rank:05d}.json"


def _attempt_key(attempt: int) -> str:
    return f"{_ATTEMPTS}{attempt:04d}.json"
