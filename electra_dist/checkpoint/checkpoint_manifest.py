"""Define the manifest of a checkpoint, a JSON file that is written last: without a manifest there is no checkpoint.

Guarantee: every byte of a checkpoint is covered by a SHA-256 digest. A tensor file consists of a header, whose length
and digest are in the manifest, and of tensors, whose offsets and digests are in the manifest. Header and tensors
follow one another without a gap up to the end of the file. The manifest contains its own digest. It is accepted only
in the exact bytes that `Manifest.dump` writes.

How: every start of a run has a number, its "attempt". A store that receives checkpoints holds these files:
    attempts/0003.json                  written by start 3 of the run; contains the identity of the run
    step-00000400-a0003/                checkpoint after 400 steps by start 3; no other start writes to this folder
        rank-00000.safetensors          fp32 tensors `master|NAME|START`, then `exp_avg|...`, then `exp_avg_sq|...`
        rank-00000.json                 manifest entry of that file, written after it; deleted after the commit
        group-00000/rank-00000.json     the same entry in a run of more than 16 ranks; deleted once it is merged
        merged-00000.json               the entries of a group, merged by its last rank; deleted after the commit
        manifest.json                   the commit: created by rank 0, only if absent, after all entries were there
        manifest.set-aside.json         replaces manifest.json of a damaged checkpoint; kept, never loaded again

A manifest of format 2 lists every tensor and takes about 150 bytes for each. That would be more than 3 MB in a large
run at ZeRO stages 0 and 3, where every rank stores a part of every parameter. The manifest then has format 3: it holds
only a run-length code of how each parameter is divided between the files (many_ranks/parameter_runs.py). The tensors
and their digests are listed in the header of each file, and the digest of the header is in the manifest. Both formats
are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from electra_dist.checkpoint.many_ranks.parameter_runs import Run, check_runs
from electra_dist.config import canonical_json
from electra_dist.errors import TornCheckpoint
from electra_dist.store.interface import Store
from electra_dist.store.json_file import parse_json
from electra_dist.store.retry import Rereading

MANIFEST = "manifest.json"
SET_ASIDE = "manifest.set-aside.json"
SET_ASIDE_REASON = "set-aside.txt"
# How set-aside.txt begins for a checkpoint that the run itself has given up, so that no repair restores it.
WITHDRAWN = "withdrawn: "
Kind = Literal["master", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_FOLDER = re.compile(r"step-([0-9]{8,})-a([0-9]{4,})")


class _Frozen(BaseModel):
    """Base class of all parts of a manifest. Instances are immutable, and an unknown key in the JSON is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorEntry(_Frozen):
    """Manifest entry of one fp32 tensor in a rank's file: elements [start, start + numel) of a flattened parameter."""

    kind: Kind  # master weight, or first or second moment of the optimizer
    name: str  # of the parameter
    start: int  # first element, counted in the flattened parameter
    numel: int  # number of elements
    offset: int  # first byte, counted from the beginning of the file
    sha256: str  # of the tensor's bytes, hexadecimal

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes that the tensor takes in its file, 4 for each element."""
        return 4 * self.numel


class FileEntry(_Frozen):
    """Manifest entry of one rank's safetensors file. The file consists of a header and tensors, without gaps."""

    name: str  # file name, such as rank-00003.safetensors
    size_bytes: int  # of the whole file
    header_bytes: int
    header_sha256: str  # hexadecimal
    tensors: tuple[TensorEntry, ...]  # in the order of the file; () if only the file's header lists them

    @property
    def is_listed_in_header(self) -> bool:
        """Return whether the tensors are listed in the file's header instead of this entry (manifest format 3)."""
        return not self.tensors and self.size_bytes > self.header_bytes

    def check_layout(self) -> None:
        """Raise TornCheckpoint unless this entry's header and tensors cover each byte of the file exactly once."""
        end = self.header_bytes
        for tensor in self.tensors:
            if tensor.offset != end:
                raise TornCheckpoint(
                    f"{MANIFEST} is inconsistent: a tensor of {self.name} should begin at byte {end}, but begins at "
                    f"byte {tensor.offset}"
                )
            end += tensor.size_bytes
        if end != self.size_bytes:
            raise TornCheckpoint(
                f"{MANIFEST} is inconsistent: the tensors of {self.name} end at byte {end}, but its size is "
                f"{self.size_bytes} bytes"
            )


class LossScaleState(_Frozen):
    """State of the dynamic loss scale of a run in fp16, equal on all ranks (engine/loss_scale.py)."""

    scale: float  # factor of the loss of the next step
    stable_steps: int  # updates since the last overflow, or since the beginning of the run
    hysteresis: int  # the overflow with this number, counted from now, halves the scale


class RunState(_Frozen):
    """What a checkpoint records besides tensors, equal on all ranks; it tells which run and step were saved."""

    step: int  # steps done or skipped; the next one has this number
    attempt: int  # start of the run that wrote the checkpoint, from 1
    identity_sha256: str  # of the config fields that decide what is computed (model, objective, seed, ...)
    corpus_fingerprint: str  # digest of the corpus
    world_size: int  # of the run that saved; a load may have another
    zero_stage: int
    shapes: dict[str, list[int]]  # parameter -> shape
    shared: dict[str, str]  # second name of a shared parameter -> the name in `shapes`
    versions: dict[str, str]  # package -> version, of the process that saved
    bit_settings: dict[str, str] = {}  # what may change the last bits (engine/bit_settings.py); {} in older versions
    rows_seen: int = 0  # rows (packed sequences) trained on since step 0
    rows_digest: int = 0  # sum of their hashes modulo 2**64 (data/receipt.py)
    skipped: tuple[int, ...] = ()  # steps below `step` on the skip list (train/skip_list_file.py), ascending
    recent_losses: tuple[float, ...] = ()  # of the last accepted steps, oldest first, for the loss guard
    # Of the evaluation at this step, if there was one. Checkpoints of older versions have `eval_rtd_loss` only.
    eval_rtd_loss: float | None = None  # loss of replaced-token detection
    eval_context_auc: float | None = None  # of an objective with a discriminator
    eval_loss: float | None = None  # of an objective without a discriminator, whose only network predicts tokens
    loss_scale: LossScaleState | None = None  # in fp16 only
    overflowed: tuple[int, ...] = ()  # steps below `step` whose gradients overflowed fp16, so no update, ascending


class Manifest(_Frozen):
    """Manifest of one checkpoint: its run state and every tensor file, with a SHA-256 for each range of bytes."""

    format: Literal[2, 3] = 2
    saved_at: str  # UTC, ISO 8601; the same in all targets
    state: RunState
    files: tuple[FileEntry, ...]
    # In format 3, the run-length code of how each parameter is divided between the files; None in format 2.
    runs: dict[str, tuple[Run, ...]] | None = None

    @property
    def size_bytes(self) -> int:
        """Return the size of all tensor files together, headers included; the manifest is not counted."""
        return sum(file.size_bytes for file in self.files)

    def dump(self) -> bytes:
        """Return the manifest as canonical JSON (keys sorted, no spaces) that ends with a newline.
        The key `sha256` holds the digest of the same JSON without that key. A loss that is not finite becomes null.
        """
        fields_of_format_3 = {"runs"} if self.runs is None else set()
        tree = json.loads(self.model_dump_json(exclude=fields_of_format_3))  # through JSON text: NaN becomes null
        return canonical_json({**tree, "sha256": _sha256(tree)}).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Parse and verify a manifest; `data` must be exactly the bytes that `dump` wrote.
        Raises TornCheckpoint if a byte was changed, the format is unknown, or a part of a parameter is not stored.
        """
        try:
            tree = parse_json(data)
            # Equal numbers can be written in several ways in JSON; only the way of `dump` is accepted.
            is_canonical = isinstance(tree, dict) and canonical_json(tree).encode() + b"\n" == data
        except ValueError:
            raise TornCheckpoint(f"{MANIFEST} is not valid JSON: bytes of it were changed") from None
        if not is_canonical:
            raise TornCheckpoint(f"{MANIFEST} is not in its canonical form: bytes of it were changed")
        recorded_digest = tree.pop("sha256", None)
        if recorded_digest != _sha256(tree):
            raise TornCheckpoint(f"{MANIFEST} does not match the digest in its key sha256: bytes of it were changed")
        try:
            manifest = cls.model_validate(tree)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise TornCheckpoint(
                f"{MANIFEST} has a format that this version of electra-dist cannot read ({reason}); use the version "
                f"that wrote it"
            ) from None
        manifest.check_coverage()
        return manifest

    def check_coverage(self) -> None:
        """Raise TornCheckpoint unless the files hold every element of every parameter and its moments exactly once.
        In format 2, the entries must also cover each byte of their files. In format 3, this is checked when the header
        of a file is read.
        """
        if self.runs is not None:
            self._check_runs(self.runs)
            return
        # Ranges of elements [start, end) that the files hold, by kind and parameter.
        ranges: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for file in self.files:
            file.check_layout()
            for tensor in file.tensors:
                ranges[tensor.kind, tensor.name].append((tensor.start, tensor.start + tensor.numel))
        unknown_names = {name for _, name in ranges} - set(self.state.shapes)
        if unknown_names:
            raise TornCheckpoint(
                f"{MANIFEST} is inconsistent: it lists tensors of unknown parameters {sorted(unknown_names)[:3]}"
            )
        for kind in KINDS:
            for name, shape in self.state.shapes.items():
                _check_ranges(f"{kind} of {name}", math.prod(shape), ranges[kind, name])

    def _check_runs(self, runs: dict[str, tuple[Run, ...]]) -> None:
        if set(runs) != set(self.state.shapes):
            names = sorted(set(runs) ^ set(self.state.shapes))[:3]
            raise TornCheckpoint(f"{MANIFEST} is inconsistent: `runs` and `shapes` differ in the parameters {names}")
        for name, shape in self.state.shapes.items():
            try:
                check_runs(name, math.prod(shape), runs[name], len(self.files))
            except TornCheckpoint as error:
                raise TornCheckpoint(f"{MANIFEST} is inconsistent: {error}") from None


def _check_ranges(label: str, numel: int, ranges: list[tuple[int, int]]) -> None:
    """Raise TornCheckpoint unless the ranges [start, end) cover the elements [0, numel) exactly once."""
    covered = 0  # elements [0, covered) are in exactly one of the ranges so far
    for start, end in sorted(ranges):
        if start != covered:
            raise TornCheckpoint(
                f"{MANIFEST} is inconsistent: elements {min(start, covered)} to {max(start, covered)} of {label} are "
                f"missing or stored twice"
            )
        covered = end
    if covered != numel:
        raise TornCheckpoint(f"{MANIFEST} is inconsistent: it lists {covered} of the {numel} elements of {label}")


def folder_name(step: int, attempt: int) -> str:
    """Return the folder name of a checkpoint that start `attempt` of the run wrote at `step`: step-00000400-a0003."""
    return f"step-{step:08d}-a{attempt:04d}"


def parse_folder(folder: str) -> tuple[int, int] | None:
    """Return (step, attempt) from the name of a checkpoint folder; None for any other name."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def committed(store: Store) -> list[tuple[int, int, str]]:
    """Return (step, attempt, folder) of every checkpoint with a manifest in a store, the newest last.
    It costs one listing. No manifest is read, so the checkpoints may be damaged.
    """
    checkpoints = []
    for key in store.list("step-"):
        folder, _, name = key.partition("/")  # step-00000400-a0003/manifest.json
        step_and_attempt = parse_folder(folder)
        if name == MANIFEST and step_and_attempt is not None:
            checkpoints.append((*step_and_attempt, folder))
    return sorted(checkpoints)


def read_manifest(store: Store, folder: str) -> Manifest:
    """Read and verify the manifest in a checkpoint's folder, but no tensor file; repeat a faulty reading.
    Raises TornCheckpoint if the manifest is damaged or belongs to another folder, StoreMissing if there is none.
    """
    manifest = _read_until_it_parses(store, f"{folder}/{MANIFEST}")
    if folder_name(manifest.state.step, manifest.state.attempt) != folder:
        raise TornCheckpoint(
            f"{folder}/{MANIFEST} is that of another checkpoint: step {manifest.state.step}, written by "
            f"start {manifest.state.attempt} of the run"
        )
    return manifest


def _read_until_it_parses(store: Store, key: str) -> Manifest:
    """Read a manifest until it is valid or two readings give the same wrong bytes; a bit may flip in transit."""

    def read_once() -> tuple[Manifest | TornCheckpoint, str]:
        data = store.read(key, must_exist=True)
        try:
            return Manifest.parse(data), ""
        except TornCheckpoint as error:
            return error, f"{error} (sha256 {hashlib.sha256(data).hexdigest()[:12]})"

    manifest, _ = Rereading(store.reread_pauses_s).read(f"{store.url}/{key}", read_once)
    if isinstance(manifest, TornCheckpoint):
        raise manifest
    return manifest


def set_aside(store: Store, folder: str, reason: str) -> None:
    """Withdraw a checkpoint without deleting data: rename its manifest, so that no load takes it.
    A repair may restore it. `reason` is stored in set-aside.txt. Raises StoreMissing if there is no manifest.
    """
    data = store.read(f"{folder}/{MANIFEST}")
    # The copy is complete before the original is deleted, so that a kill in between loses nothing.
    store.write(f"{folder}/{SET_ASIDE_REASON}", (reason + "\n").encode())
    store.write(f"{folder}/{SET_ASIDE}", data)
    store.delete(f"{folder}/{MANIFEST}")


def _sha256(tree: dict[str, object]) -> str:
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()
