"""What a checkpoint promises: one JSON document, committed last. A checkpoint exists if and only if it does.

Layout below the checkpoint store:
    step-00000400-a0003/                step reached, attempt that wrote it (an attempt never writes another's folder)
        rank-00000.safetensors          fp32 fragments: tensor `master|NAME|START`, `exp_avg|...`, `exp_avg_sq|...`
        rank-00000.json                 this rank's part of the manifest; written after its file
        manifest.json                   the commit: conditional create, by rank 0, after all parts were there
        manifest.set-aside.json         instead of manifest.json: found bad at a load; kept, never used again
"""

from __future__ import annotations

import re
from collections import defaultdict

from pydantic import BaseModel, ConfigDict, ValidationError

from electra_dist.errors import TornCheckpoint
from electra_dist.store import Store

MANIFEST = "manifest.json"
SET_ASIDE = "manifest.set-aside.json"
_FOLDER = re.compile(r"step-(\d{8,})-a(\d{4,})")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Frozen):
    """One safetensors file with its size and digest."""

    name: str
    size_bytes: int
    sha256: str


class FragmentEntry(_Frozen):
    """Elements [start, start + numel) of a flattened parameter; three tensors of `file`."""

    name: str
    start: int
    numel: int
    file: str


class RankPart(_Frozen):
    """What one rank wrote."""

    rank: int
    file: FileEntry
    fragments: tuple[FragmentEntry, ...]


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

    format: int = 1
    state: RunState
    parts: tuple[RankPart, ...]

    def check_coverage(self) -> None:
        """Every element of every parameter exactly once.

        Raises:
            TornCheckpoint: names the first parameter that is not.
        """
        ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for part in self.parts:
            for f in part.fragments:
                ranges[f.name].append((f.start, f.start + f.numel))
        if unknown := set(ranges) - set(self.state.shapes):
            raise TornCheckpoint(f"{MANIFEST} has fragments of unknown parameters {sorted(unknown)[:3]}")
        for name, shape in self.state.shapes.items():
            reached, numel = 0, 1
            for size in shape:
                numel *= size
            for start, end in sorted(ranges[name]):
                if start != reached:
                    raise TornCheckpoint(f"{name}: elements {min(start, reached)}..{max(start, reached)} not once")
                reached = end
            if reached != numel:
                raise TornCheckpoint(f"{name}: {reached} of {numel} elements")


def folder_name(step: int, attempt: int) -> str:
    """The folder of the checkpoint that `attempt` writes after `step` steps."""
    return f"step-{step:08d}-a{attempt:04d}"


def committed(store: Store, name: str = MANIFEST) -> list[tuple[int, int, str]]:
    """(step, attempt, folder) of every committed checkpoint, newest last."""
    found = []
    for key in store.list():
        folder, _, rest = key.partition("/")
        match = _FOLDER.fullmatch(folder)
        if match and rest == name:
            found.append((int(match[1]), int(match[2]), folder))
    return sorted(found)


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a committed checkpoint, checked for shape and coverage (not yet its files' digests).

    Raises:
        TornCheckpoint: it is not a manifest, or not that folder's.
    """
    try:
        manifest = Manifest.model_validate_json(store.read(f"{folder}/{MANIFEST}"))
    except ValidationError as error:
        raise TornCheckpoint(f"{MANIFEST} is not readable: {error.errors()[0]['msg']}") from None
    if folder_name(manifest.state.step, manifest.state.attempt) != folder:
        raise TornCheckpoint(f"{MANIFEST} is of step {manifest.state.step}, attempt {manifest.state.attempt}")
    manifest.check_coverage()
    return manifest


def set_aside(store: Store, folder: str, reason: str) -> None:
    """Take a bad checkpoint out of the running without losing a byte of it."""
    data = store.read(f"{folder}/{MANIFEST}")
    store.write(f"{folder}/{SET_ASIDE}", data)
    store.write(f"{folder}/set-aside.txt", (reason + "\n").encode())
    store.delete(f"{folder}/{MANIFEST}")
