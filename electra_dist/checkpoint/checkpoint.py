"""Name a checkpoint in a store, list the checkpoints of several stores, and read manifests and headers.

A store that receives checkpoints holds each in a folder such as step-00000400-a0003 (`manifest.py`). A checkpoint
exists once its manifest does.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from electra_dist.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, tensors_of_header
from electra_dist.errors import StorageLost, StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store, in_parallel

FIRST_TRY_S = 20.0  # wait for one of several copies before the next copy is tried
SET_ASIDE = "manifest.set-aside.json"
SET_ASIDE_REASON = "set-aside.txt"
# How set-aside.txt begins for a checkpoint that the run itself has given up, so that no repair restores it.
WITHDRAWN = "withdrawn: "
_FOLDER = re.compile(r"step-([0-9]{8,})-a([0-9]{4,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in one store: saved after `step` steps by start `attempt` of the run. It may be damaged."""

    step: int
    attempt: int
    store: Store

    @property
    def folder(self) -> str:
        """Return the name of its folder in the store, such as step-00000400-a0003."""
        return f"step-{self.step:08d}-a{self.attempt:04d}"

    @property
    def url(self) -> str:
        """Return the URL of its folder, for messages."""
        return f"{self.store.url}/{self.folder}"

    def key(self, name: str) -> str:
        """Return the key of one of its files in the store."""
        return f"{self.folder}/{name}"

    def manifest(self) -> Manifest:
        """Read and verify the manifest, but no tensor file; repeat a faulty reading.
        Raises TornCheckpoint if the manifest is damaged or belongs to another folder, StoreMissing if there is none.
        """
        key = self.key(MANIFEST)

        def read_once() -> tuple[Manifest | TornCheckpoint, str]:
            data = self.store.read(key)
            try:
                return Manifest.parse(data), ""
            except TornCheckpoint as error:
                return error, f"{error} (sha256 {hashlib.sha256(data).hexdigest()[:12]})"

        manifest, _ = self.store.reread(key, read_once)
        if isinstance(manifest, TornCheckpoint):
            raise manifest
        state = manifest.state
        if (state.step, state.attempt) != (self.step, self.attempt):
            raise TornCheckpoint(
                f"{key} is that of another checkpoint: step {state.step}, written by start {state.attempt} of the run"
            )
        return manifest

    def tensors(self, file: FileEntry) -> tuple[list[TensorEntry], str]:
        """Read and verify a file's header; return the tensors that it lists, and what is wrong ("" for a good header).
        Raises TornCheckpoint if the header is as it was written, but inconsistent.
        """
        key = self.key(file.name)

        def read_once() -> tuple[bytes, str]:
            try:
                header = bytes(self.store.read_range(key, 0, file.header_bytes))
            except StoreMissing:
                return b"", missing(file.name)
            found_sha256 = hashlib.sha256(header).hexdigest()
            if found_sha256 == file.header_sha256:
                return header, ""
            return header, f"the header of {file.name} does not match its digest (found {found_sha256[:12]})"

        header, fault = self.store.reread(key, read_once)
        return ([], fault) if fault else (tensors_of_header(file, header), "")

    def set_aside(self, reason: str) -> None:
        """Withdraw the checkpoint without deleting data: rename its manifest, so that no load takes it.
        A repair may restore it. `reason` is stored in set-aside.txt. Raises StoreMissing if there is no manifest.
        """
        data = self.store.read(self.key(MANIFEST))
        # The copy is complete before the original is deleted, so that a kill in between loses nothing.
        self.store.write(self.key(SET_ASIDE_REASON), (reason + "\n").encode())
        self.store.write(self.key(SET_ASIDE), data)
        self.store.delete(self.key(MANIFEST))


def missing(file: str) -> str:
    """Return the text for a missing file; callers compare with it to tell a missing file from a damaged one."""
    return f"{file} is missing"


def parse_folder(folder: str) -> tuple[int, int] | None:
    """Return (step, attempt) from the name of a checkpoint folder; None for any other name."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def checkpoints(stores: Sequence[Store]) -> list[Checkpoint]:
    """Return every checkpoint of several stores that has a manifest, newest first; copies in the order of the stores.
    It costs one listing for each store. No manifest is read, so the checkpoints may be damaged. Stores that are away
    are waited for at once, because each of them may have the newest checkpoint.
    """
    found = itertools.chain.from_iterable(in_parallel(_checkpoints_in, stores))
    return sorted(found, key=lambda checkpoint: (-checkpoint.step, -checkpoint.attempt))


def _checkpoints_in(store: Store, prefix: str = "step-") -> list[Checkpoint]:
    found = []
    for key in store.list(prefix):
        folder, _, name = key.partition("/")  # step-00000400-a0003/manifest.json
        step_and_attempt = parse_folder(folder)
        if name == MANIFEST and step_and_attempt is not None:
            found.append(Checkpoint(*step_and_attempt, store))
    return found


def copies_of_each(found: Sequence[Checkpoint]) -> list[list[Checkpoint]]:
    """Group neighbouring checkpoints of one step and attempt, which are copies in several stores."""
    groups = itertools.groupby(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))
    return [list(copies) for _, copies in groups]


def tries(copies: Sequence[Checkpoint]) -> Iterator[tuple[Checkpoint, float]]:
    """Yield the copies of a checkpoint in the order in which to read them, each with the longest wait in seconds.
    All come once with a short wait, then with the whole patience of their stores. So a store that is away is waited
    for only if no other one has a good copy.
    """
    if len(copies) > 1:
        for copy in copies:
            yield copy, FIRST_TRY_S
    for copy in copies:
        yield copy, math.inf


def checkpoints_of_step(stores: Sequence[Store], step: int) -> list[Checkpoint]:
    """Return the checkpoints of one step, those of the newest start first; copies in the order of the stores.
    A store that is away is left out, unless no other store has such a checkpoint: then it is waited for.
    """
    found: list[Checkpoint] = []
    away: list[Store] = []
    for store in stores:
        try:
            with store.patience.at_most(FIRST_TRY_S):
                found += _checkpoints_in(store, f"step-{step:08d}-")
        except StorageLost:
            away.append(store)
    if not found:
        found = [checkpoint for checkpoint in checkpoints(away) if checkpoint.step == step]
    return sorted(found, key=lambda checkpoint: -checkpoint.attempt)
