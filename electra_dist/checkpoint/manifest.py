"""Define the files of a checkpoint: tensor files, whose names say how to verify them, and a manifest, written last.

Guarantee: every byte of a checkpoint is covered by a SHA-256 digest. The manifest contains its own digest and the
names of all tensor files. The name of a tensor file contains its size, and length and digest of its header. The header
lists the file's tensors with their offsets and digests. Header and tensors follow one another without a gap up to the
end of the file. A manifest is accepted only in the exact bytes that `Manifest.dump` writes.

How: every start of a run has a number, its "attempt". A store that receives checkpoints holds these files:
    attempts/0003.json                  written by start 3 of the run; contains the identity of the run
    step-00000400-a0003/                checkpoint after 400 steps by start 3; no other start writes to this folder
        rank-00000.SIZE.HEADER.SHA256.safetensors
                                        fp32 tensors `master|NAME|START`, then `exp_avg|...`, then `exp_avg_sq|...`
        manifest.json                   the commit: created by rank 0, only if absent, after all files were there
        manifest.set-aside.json         replaces manifest.json of a damaged checkpoint; kept, never loaded again

A file appears under its name when it is whole. So a listing that shows the files of all ranks in their right sizes is
all that rank 0 needs for the manifest, except for the ranges of parameters that each file holds. At ZeRO stages 0 and
3, `part` computes these. At stages 1 and 2, they are read from the headers and listed in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from electra_dist.errors import TornCheckpoint
from electra_dist.store.json_file import canonical_json, parse_json

if TYPE_CHECKING:  # Commands that only read a manifest answer sooner.
    import torch

MANIFEST = "manifest.json"
Kind = Literal["master", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Range = tuple[int, int]  # elements [start, end) of a flattened parameter
LENGTH_BYTES = 8  # of the number that precedes the JSON of a header
DIGEST_CHARACTERS = 64  # of a SHA-256 in hexadecimal

_FILE = re.compile(r"rank-([0-9]{5,})\.([0-9]+)\.([0-9]+)\.([0-9a-f]{64})\.safetensors")
_EVENLY_DIVIDED = (0, 3)  # ZeRO stages at which rank r stores `part(numel, ranks, r)` of every parameter


def part(numel: int, world_size: int, rank: int) -> Range:
    """Return the elements [start, end) of a flattened parameter that a rank stores if the ranks divide it evenly.
    All parts have the same size, except that the last ranks may have a shorter or an empty one. DeepSpeed divides
    parameters in this way at ZeRO stage 3.
    """
    size = -(-numel // world_size)
    start = min(rank * size, numel)
    return start, min(start + size, numel)


class _Frozen(BaseModel):
    """Base class of all parts of a manifest. Instances are immutable, and an unknown key in the JSON is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Entry of one fp32 tensor in a file's header: elements [start, start + numel) of a flattened parameter."""

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


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A range of one parameter that a rank holds: elements [start, start + numel) of the flattened parameter.
    Its weights and optimizer moments are views, which share memory with the tensors of the training state.
    """

    name: str  # of the parameter
    start: int  # first element, counted in the flattened parameter
    numel: int  # number of elements
    views: dict[Kind, torch.Tensor]  # kind -> writable 1-D fp32 view of `numel` elements


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A rank's tensor file, as its name describes it. The file consists of a header and tensors, without gaps."""

    rank: int  # that wrote it
    size_bytes: int  # of the whole file
    header_bytes: int
    header_sha256: str  # hexadecimal

    @property
    def name(self) -> str:
        """Return the name of the file in the checkpoint's folder."""
        return f"rank-{self.rank:05d}.{self.size_bytes}.{self.header_bytes}.{self.header_sha256}.safetensors"

    @classmethod
    def parse(cls, name: str) -> FileEntry | None:
        """Return the entry that the name of a tensor file describes; None for any other name."""
        match = _FILE.fullmatch(name)
        if match is None:
            return None
        entry = cls(rank=int(match[1]), size_bytes=int(match[2]), header_bytes=int(match[3]), header_sha256=match[4])
        return entry if entry.name == name else None


def _file_entry(value: Any) -> FileEntry:
    entry = value if isinstance(value, FileEntry) else FileEntry.parse(str(value))
    if entry is None:
        raise ValueError(f"{value!r} is no name of a tensor file")
    return entry


# In JSON the name of the file, which says all.
_FileName = Annotated[FileEntry, BeforeValidator(_file_entry), PlainSerializer(lambda entry: entry.name)]


class LossScaleState(_Frozen):
    """State of the dynamic loss scale of a run in fp16, equal on all ranks (engine/zero.py)."""

    scale: float  # factor of the loss of the next step
    stable_steps: int  # updates since the last overflow, or since the beginning of the run
    hysteresis: int  # the overflow with this number, counted from now, halves the scale


class RunState(_Frozen):
    """What a checkpoint records besides tensors, equal on all ranks: which run and step it is of, and their state."""

    step: int  # steps done or skipped; the next one has this number
    attempt: int  # start of the run that wrote the checkpoint, from 1
    identity_sha256: str  # of the config fields that decide what is computed (model, objective, seed, ...)
    corpus_fingerprint: str  # digest of the corpus
    world_size: int  # of the run that saved; a load may have another
    zero_stage: int
    shapes: dict[str, list[int]]  # parameter -> shape
    shared: dict[str, str]  # second name of a shared parameter -> the name in `shapes`
    versions: dict[str, str]  # package -> version, of the process that saved
    bit_settings: dict[str, str]  # what may change the last bits (engine/bit_settings.py)
    rows_seen: int = 0  # rows (packed sequences) trained on since step 0
    rows_digest: int = 0  # sum of their hashes modulo 2**64 (data/receipt.py)
    skipped: tuple[int, ...] = ()  # steps below `step` on the skip list (train/guard.py), ascending
    recent_losses: tuple[float, ...] = ()  # of the last accepted steps, oldest first, for the loss guard
    # Of the evaluation at this step, if there was one.
    eval_context_auc: float | None = None  # of an objective with a discriminator
    eval_loss: float | None = None  # of the discriminator or, without one, of the network that predicts tokens
    loss_scale: LossScaleState | None = None  # in fp16 only
    overflowed: tuple[int, ...] = ()  # steps below `step` whose gradients overflowed fp16, so no update, ascending

    @property
    def is_divided_evenly(self) -> bool:
        """Return whether each parameter is divided among the ranks, by `part`: True at ZeRO 0 and 3.

        At ZeRO 1 and 2, the ranks divide all parameters as one sequence.
        """
        return self.zero_stage in _EVENLY_DIVIDED

    def parts(self, rank: int) -> dict[str, Range]:
        """Return parameter name -> elements [start, end) that a rank stores, where the ranks divide parameters evenly.
        Parameters of which the rank stores nothing are left out.
        """
        ranges = {name: part(math.prod(shape), self.world_size, rank) for name, shape in self.shapes.items()}
        return {name: (start, end) for name, (start, end) in ranges.items() if start < end}


class Manifest(_Frozen):
    """Manifest of one checkpoint: its run state, its tensor files, and which ranges of parameters each file holds."""

    format: Literal[1] = 1
    saved_at: str  # UTC, ISO 8601; the same in all targets
    state: RunState
    files: tuple[_FileName, ...]  # in the order of the ranks that wrote them
    # At ZeRO stages 1 and 2, parameter -> (rank, first element, element after the last) of each range, in the order of
    # the elements; None if the parameters are divided evenly.
    ranges: dict[str, tuple[tuple[int, int, int], ...]] | None = None

    @property
    def size_bytes(self) -> int:
        """Return the size of all tensor files together, headers included; the manifest is not counted."""
        return sum(file.size_bytes for file in self.files)

    def ranges_of(self, rank: int) -> dict[str, Range]:
        """Return parameter name -> elements [start, end) that the file of a rank holds, without empty ranges."""
        if self.ranges is None:
            return self.state.parts(rank)
        return {
            name: (start, end)
            for name, ranges in self.ranges.items()
            for range_rank, start, end in ranges
            if range_rank == rank
        }

    def ranks_with(self, name: str, start: int, end: int) -> Sequence[int]:
        """Return the ranks whose files hold any of the elements [start, end) of a parameter, at least one."""
        if self.ranges is None:
            _, size = part(math.prod(self.state.shapes[name]), self.state.world_size, 0)
            return range(start // size, (end - 1) // size + 1)
        return [rank for rank, first, last in self.ranges[name] if first < end and start < last]

    def dump(self) -> bytes:
        """Return the manifest as canonical JSON (keys sorted, no spaces) that ends with a newline.
        The key `sha256` holds the digest of the same JSON without that key. A loss that is not finite becomes null.
        """
        tree = json.loads(self.model_dump_json())  # through JSON text: NaN becomes null
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
        """Raise TornCheckpoint unless the files hold every element of each parameter and its moments exactly once."""
        ranks = [file.rank for file in self.files]
        if ranks != list(range(self.state.world_size)):
            raise TornCheckpoint(
                f"{MANIFEST} is inconsistent: it lists {len(ranks)} files that are not those of the "
                f"{self.state.world_size} ranks in their order"
            )
        if self.state.is_divided_evenly != (self.ranges is None):
            raise TornCheckpoint(
                f"{MANIFEST} is inconsistent: `ranges` does not fit ZeRO stage {self.state.zero_stage}"
            )
        if self.ranges is not None:
            _check_ranges(self.state, self.ranges)
        for file, numel in zip(self.files, self._elements_of_files()):
            size_bytes = file.header_bytes + 4 * len(KINDS) * numel
            if file.size_bytes != size_bytes:
                raise TornCheckpoint(
                    f"{MANIFEST} is inconsistent: header and tensors of {file.name} end at byte {size_bytes}"
                )

    def _elements_of_files(self) -> list[int]:
        """Return the number of parameter elements that each file holds; each element comes with its two moments."""
        elements = [0] * len(self.files)
        for name, shape in self.state.shapes.items():
            numel = math.prod(shape)
            if self.ranges is not None:
                for rank, start, end in self.ranges[name]:
                    elements[rank] += end - start
                continue
            _, part_numel = part(numel, len(elements), 0)
            for rank, start in enumerate(range(0, numel, part_numel)):
                elements[rank] += min(part_numel, numel - start)
        return elements


def _check_ranges(state: RunState, ranges: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
    """Raise TornCheckpoint unless the ranges cover each element of each parameter exactly once."""
    if set(ranges) != set(state.shapes):
        names = sorted(set(ranges) ^ set(state.shapes))[:3]
        raise TornCheckpoint(f"{MANIFEST} is inconsistent: `ranges` and `shapes` differ in the parameters {names}")
    for name, shape in state.shapes.items():
        covered = 0  # elements [0, covered) are in exactly one of the ranges so far
        for rank, start, end in ranges[name]:
            if start != covered or end <= start or not 0 <= rank < state.world_size:
                raise TornCheckpoint(
                    f"{MANIFEST} is inconsistent: elements {min(start, covered)} to {max(start, covered)} of {name} "
                    f"are missing or stored twice"
                )
            covered = end
        numel = math.prod(shape)
        if covered != numel:
            raise TornCheckpoint(f"{MANIFEST} is inconsistent: it lists {covered} of the {numel} elements of {name}")


def tensors_of_header(file: FileEntry, header: bytes) -> list[TensorEntry]:
    """Return the tensors that a file's header lists, in their order. The caller has verified the header's digest.
    Raises TornCheckpoint if header and tensors do not cover every byte of the file exactly once.
    """
    table = json.loads(header[LENGTH_BYTES:])
    digests = table.pop("__metadata__")["sha256"]
    tensors = []
    end = file.header_bytes
    for number, (name, description) in enumerate(table.items()):
        kind, parameter, start = name.split("|")
        first_byte, _ = description["data_offsets"]  # counted from the end of the header
        tensor = TensorEntry(
            kind=cast(Kind, kind),
            name=parameter,
            start=int(start),
            numel=description["shape"][0],
            offset=file.header_bytes + first_byte,
            sha256=digests[number * DIGEST_CHARACTERS : (number + 1) * DIGEST_CHARACTERS],
        )
        if tensor.offset != end:
            raise TornCheckpoint(
                f"the header of {file.name} is inconsistent: a tensor should begin at byte {end}, but begins at byte "
                f"{tensor.offset}"
            )
        end += tensor.size_bytes
        tensors.append(tensor)
    if end != file.size_bytes:
        raise TornCheckpoint(
            f"the header of {file.name} is inconsistent: its tensors end at byte {end}, but its size is "
            f"{file.size_bytes} bytes"
        )
    return tensors


def ranges_of_tensors(file: FileEntry, tensors: Sequence[TensorEntry]) -> dict[str, Range]:
    """Return parameter name -> elements [start, end) that the tensors of a file hold.
    Raises TornCheckpoint unless weights and both moments have the same ranges, one of each parameter.
    """
    ranges_of_kinds: dict[str, dict[str, Range]] = {kind: {} for kind in KINDS}
    for tensor in tensors:
        ranges = ranges_of_kinds[tensor.kind]
        start, end = ranges.get(tensor.name, (tensor.start, tensor.start))
        if end != tensor.start:
            raise TornCheckpoint(f"the header of {file.name} is inconsistent: {tensor.name} is stored with a hole")
        ranges[tensor.name] = (start, tensor.start + tensor.numel)
    masters = ranges_of_kinds["master"]
    if any(ranges != masters for ranges in ranges_of_kinds.values()):
        raise TornCheckpoint(
            f"the header of {file.name} is inconsistent: the moments are not those of the weights that it holds"
        )
    return masters


def _sha256(tree: dict[str, object]) -> str:
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()
