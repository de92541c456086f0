"""Name a checkpoint in a store, list the checkpoints of several stores, and read manifests and headers.

A store that receives checkpoints holds each in a folder such as step-00000400-a0003 (`manifest.py`). A checkpoint
exists once its manifest does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from electra_dist.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, tensors_of_header
from electra_dist.errors import StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store

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

    def is_copy_of(self, other: Checkpoint) -> bool:
        """Return whether two checkpoints have the same step and attempt, and so are the same in two stores."""
        return (self.step, self.attempt) == (other.step, other.attempt)

    def manifest(self) -> Manifest:
        """Read and verify the manifest, but no tensor file; repeat a faulty reading.
        Raises TornCheckpoint if the manifest is damaged or belongs to another folder, StoreMissing if there is none.
        """
        key = self.key(MANIFEST)

        def read_once() -> tuple[Manifest | TornCheckpoint, str]:
            data = self.store.read(key, must_exist=True)
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
                header = bytes(self.store.read_range(key, 0, file.header_bytes, must_exist=True))
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


def checkpoints(stores: Iterable[Store]) -> list[Checkpoint]:
    """Return every checkpoint of several stores that has a manifest, newest first; copies in the order of the stores.
    It costs one listing for each store. No manifest is read, so the checkpoints may be damaged.
    """
    found = []
    for store in stores:
        for key in store.list("step-"):
            folder, _, name = key.partition("/")  # step-00000400-a0003/manifest.json
            step_and_attempt = parse_folder(folder)
            if name == MANIFEST and step_and_attempt is not None:
                found.append(Checkpoint(*step_and_attempt, store))
    return sorted(found, key=lambda checkpoint: (-checkpoint.step, -checkpoint.attempt))
