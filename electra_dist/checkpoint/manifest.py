"""What a checkpoint promises: one JSON document, committed last. A checkpoint exists if and only if it does.

Guarantee: every byte of a checkpoint is under a digest. A file is its header (length and digest here) and, from there
to its end without a gap, tensors (offset and digest here); the manifest is under its own digest, and is accepted only
in the one spelling that this code gives it.

Layout below a target:
    attempts/0003.json                  which run this is; one file for each start of it
    step-00000400-a0003/                step reached, attempt that wrote it (an attempt never writes another's folder)
        rank-00000.safetensors          fp32 tensors `master|NAME|START`, then `exp_avg|...`, then `exp_avg_sq|...`
        rank-00000.json                 that file's entry, written after it; deleted after the commit
        manifest.json                   the commit: conditional create, by rank 0, after all entries were there
        manifest.set-aside.json         instead of manifest.json: found bad at a load; kept, never used again

Cost: 150 bytes for each tensor. At ZeRO-3 there are ranks x parameters x 3 of them: 23 MB for ELECTRA-Large on 64.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import defaultdict
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from electra_dist.config import canonical_json
from electra_dist.errors import TornCheckpoint
from electra_dist.store.interface import Store

MANIFEST = "manifest.json"
SET_ASIDE = "manifest.set-aside.json"
SET_ASIDE_REASON = "set-aside.txt"
Kind = Literal["master", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
READINGS = 5  # until bytes that come out wrong are believed to be wrong where they lie, and not flipped on the way
_FOLDER = re.compile(r"step-(\d{8,})-a(\d{4,})")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorEntry(_Frozen):
    """Elements [start, start + numel) of one kind of a flattened parameter: `numel` fp32 at `offset` of a file."""

    kind: Kind
    name: str
    start: int
    numel: int
    offset: int
    sha256: str

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return 4 * self.numel


class FileEntry(_Frozen):
    """One rank's safetensors file: a header, then `tensors`, which reach to its end."""

    name: str
    size_bytes: int
    header_bytes: int
    header_sha256: str
    tensors: tuple[TensorEntry, ...]

    def check_layout(self) -> None:
        """Every byte under one digest.

        Raises:
            TornCheckpoint: there is a gap or an overlap.
        """
        end = self.header_bytes
        for tensor in self.tensors:
            if tensor.offset != end:
                raise TornCheckpoint(f"{self.name}: bytes {end} to {tensor.offset} are under no digest")
            end += tensor.size_bytes
        if end != self.size_bytes:
            raise TornCheckpoint(f"{self.name}: tensors end at byte {end} of {self.size_bytes}")


class RunState(_Frozen):
    """What identifies the state beside its tensors. `step` steps are done or skipped; step `step` is next."""

    step: int
    attempt: int
    identity_sha256: str
    corpus_fingerprint: str
    world_size: int
    zero_stage: int
    shapes: dict[str, list[int]]
    shared: dict[str, str]
    versions: dict[str, str]
    rows_seen: int = 0  # rows trained on, and the sum of their digests (data/receipt.py)
    rows_digest: int = 0
    skipped: tuple[int, ...] = ()  # steps below `step` that were passed over, ascending
    recent_losses: tuple[float, ...] = ()  # of the last accepted steps, oldest first: the guard's window
    eval_rtd_loss: float | None = None  # of the evaluation at this step, if there was one


class Manifest(_Frozen):
    """The whole checkpoint."""

    format: Literal[2] = 2
    saved_at: str  # UTC, ISO 8601; the same in all targets
    state: RunState
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def dump(self) -> bytes:
        """The document: canonical JSON, with the digest of itself without that digest."""
        tree = json.loads(self.model_dump_json())  # by way of JSON: a loss that is not a number becomes null
        return canonical_json({**tree, "sha256": _sha256(tree)}).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """The manifest that `dump` wrote.

        Raises:
            TornCheckpoint: a byte of it is different.
        """
        try:
            tree = json.loads(data)
            if not isinstance(tree, dict) or canonical_json(tree).encode() + b"\n" != data:
                raise TornCheckpoint(f"{MANIFEST} is not in the form that it was written in")
            if tree.pop("sha256", None) != _sha256(tree):
                raise TornCheckpoint(f"{MANIFEST} does not match its own digest")
            manifest = cls.model_validate(tree)
        except ValidationError as error:
            raise TornCheckpoint(f"{MANIFEST} is of another format: {error.errors()[0]['msg']}") from None
        except (ValueError, RecursionError):
            raise TornCheckpoint(f"{MANIFEST} is not readable") from None
        manifest.check_coverage()
        return manifest

    def check_coverage(self) -> None:
        """Every element of every parameter exactly once in each kind, every byte of each file under one digest.

        Raises:
            TornCheckpoint: names the first parameter or file that is not so.
        """
        ranges: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for file in self.files:
            file.check_layout()
            for t in file.tensors:
                ranges[t.kind, t.name].append((t.start, t.start + t.numel))
        if unknown := {name for _, name in ranges} - set(self.state.shapes):
            raise TornCheckpoint(f"{MANIFEST} has tensors of unknown parameters {sorted(unknown)[:3]}")
        for kind, (name, shape) in itertools.product(KINDS, self.state.shapes.items()):
            reached, numel = 0, math.prod(shape)
            for start, end in sorted(ranges[kind, name]):
                if start != reached:
                    where = f"elements {min(start, reached)} to {max(start, reached)}"
                    raise TornCheckpoint(f"{kind} of {name}: {where} are not there exactly once")
                reached = end
            if reached != numel:
                raise TornCheckpoint(f"{kind} of {name}: {reached} of {numel} elements")


def folder_name(step: int, attempt: int) -> str:
    """The folder of the checkpoint that `attempt` writes after `step` steps."""
    return f"step-{step:08d}-a{attempt:04d}"


def parse_folder(folder: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's folder name; None if it is another name."""
    match = _FOLDER.fullmatch(folder)
    return (int(match[1]), int(match[2])) if match else None


def committed(store: Store) -> list[tuple[int, int, str]]:
    """(step, attempt, folder) of every committed checkpoint, newest last."""
    found = []
    for key in store.list("step-"):
        folder, _, rest = key.partition("/")
        if rest == MANIFEST and (place := parse_folder(folder)):
            found.append((*place, folder))
    return sorted(found)


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a committed checkpoint, itself checked to the last byte (not yet its files).

    Raises:
        TornCheckpoint: it is damaged, or not that folder's.
        StoreError: it cannot be read.
    """
    for reading in range(1, READINGS + 1):
        try:
            manifest = Manifest.parse(store.read(f"{folder}/{MANIFEST}"))
            break
        except TornCheckpoint:
            if reading == READINGS:
                raise
    if folder_name(manifest.state.step, manifest.state.attempt) != folder:
        raise TornCheckpoint(f"{MANIFEST} is of step {manifest.state.step}, attempt {manifest.state.attempt}")
    return manifest


def set_aside(store: Store, folder: str, reason: str) -> None:
    """Take a bad checkpoint out of the running without losing a byte of it."""
    data = store.read(f"{folder}/{MANIFEST}")
    store.write(f"{folder}/{SET_ASIDE_REASON}", (reason + "\n").encode())
    store.write(f"{folder}/{SET_ASIDE}", data)
    store.delete(f"{folder}/{MANIFEST}")


def _sha256(tree: dict[str, object]) -> str:
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()
