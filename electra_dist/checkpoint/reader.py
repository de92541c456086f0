"""Read parts of a checkpoint's files, and load the newest good checkpoint at any world size and any ZeRO stage.

Guarantee: each tensor is checked against its digest before a byte of it is used, so callers receive exactly the bytes
that the manifest describes. A file's size and the digest of its header are compared with its name. All other bytes are
in tensors, whose digests are in the header. A header or a tensor that does not match is read again, with pauses, and
counts as damaged only if two readings agree (`Store.reread`). So a bit that was flipped on the way from the store is
not damage of the checkpoint. Functions return damage as lines of text, "faults".

When a run is loaded, each rank reads only the ranges of parameters that it holds. Together the ranks have verified
every byte before training goes on. A checkpoint that is damaged, incomplete or of another run is reported, and set
aside (renamed, not deleted) once a good one is loaded. The next one to be tried is its copy in another target (a store
that receives every checkpoint), then the next older one. All ranks load the same checkpoint. If there are checkpoints
and none is good, the run ends instead of beginning again; only after a rollback that has discarded all of them, it
begins again at step 0. No pickle is read.

A checkpoint that cannot be read at all (the service is down, a permission is missing) does not count as damaged. A
target that is away is waited for as long as its patience allows, but not before the copies in all other targets were
tried. If no copy can be read, the run ends with the store's error instead of losing steps.

Limits: the listing at the beginning waits for every target, because one that is away may have the newest checkpoint.

Cost: tensors that are neighbours in a file are read by one request of at most `REQUEST_BYTES`. There are `THREADS`
requests at a time, so a rank holds at most 256 MB. At stages 1 to 3 the ranks together read the checkpoint once,
except that each rank that holds a part of a stored tensor reads the whole tensor. At stage 0 every rank reads all of
the checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from electra_dist.checkpoint.manifest import FileEntry, Fragment, Manifest, RunState, TensorEntry, ranges_of_tensors
from electra_dist.checkpoint.stored_copies import (
    WITHDRAWN,
    Checkpoint,
    Discarded,
    check_resumable,
    checkpoints,
    copies_of_each,
    first_good,
    missing,
    none_is_good,
)
from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import StorageLost, StoreError, StoreMissing, TornCheckpoint
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store, in_parallel

REQUEST_BYTES = 64 << 20  # 64 MiB: limit of one request, unless a single tensor is larger
THREADS = 4  # requests at a time
# Errors of which one is raised on all ranks if a rank cannot load a checkpoint, by the names that ranks exchange. The
# first two prove damage, or that the checkpoint is of no use to this run; after the others it may be good.
_ERRORS: Mapping[str, type[TornCheckpoint | StoreError]] = {
    error.__name__: error for error in (Discarded, TornCheckpoint, StorageLost, StoreError)
}


@dataclass(frozen=True)
class Request:
    """One read from a store: adjoining tensors of one file."""

    file: str  # file name in the checkpoint's folder
    tensors: tuple[TensorEntry, ...]  # at least one, in the order of the file

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes to read."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def requests(
    file: FileEntry, tensors: Sequence[TensorEntry], wanted: Callable[[TensorEntry], bool] = lambda tensor: True
) -> Iterator[Request]:
    """Group the tensors that `wanted` accepts into few reads of adjoining tensors, in the order of the file.
    A request has at most `REQUEST_BYTES`, unless a single tensor is larger.
    """
    neighbours: list[TensorEntry] = []  # wanted tensors without a gap between them, not yet in a request
    size_bytes = 0  # of the neighbours
    for tensor in tensors:
        is_wanted = wanted(tensor)
        is_too_much = size_bytes + tensor.size_bytes > REQUEST_BYTES
        # A tensor that is not wanted leaves a gap, and one that is too much does not fit: both end the request.
        if neighbours and (not is_wanted or is_too_much):
            yield Request(file.name, tuple(neighbours))
            neighbours = []
            size_bytes = 0
        if is_wanted:
            neighbours.append(tensor)
            size_bytes += tensor.size_bytes
    if neighbours:
        yield Request(file.name, tuple(neighbours))


class CheckpointReader:
    """Reader of one checkpoint, whose manifest it has read; several threads may use it at once."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest | None = None) -> None:
        """Read the manifest unless it is given; raise TornCheckpoint if it is damaged, StoreMissing if absent."""
        self.checkpoint = checkpoint
        self.manifest = checkpoint.manifest() if manifest is None else manifest
        self._store = checkpoint.store

    def fill(self, fragments: Sequence[Fragment], check: Sequence[FileEntry]) -> list[str]:
        """Read the values of `fragments` (ranges of parameters) into their tensors; return a line for each fault.
        Stored tensors that share no element with a fragment are not read; each other one is verified before it is
        used. After a fault, the fragments are partly overwritten. Size and header of the files in `check` are
        verified, too: ranks may divide this work. Not collective. Raises TornCheckpoint if a file contradicts the
        manifest.
        """
        destinations = _Destinations(fragments)
        files = self._files_needed(fragments, check)
        needed_requests: list[Request] = []
        faults: list[str] = []
        for file, (tensors, header_faults) in zip(files, in_parallel(self._tensors, files)):
            faults.extend(header_faults)
            needed_requests.extend(requests(file, tensors, destinations.need))
        present_files = [file for file in check if missing(file.name) not in faults]
        faults_of_sizes = in_parallel(self._size_faults, present_files, THREADS)
        faults_of_requests = in_parallel(
            lambda request: self._read(request, destinations.copy), needed_requests, THREADS
        )
        return [*faults, *itertools.chain(*faults_of_sizes, *faults_of_requests)]

    def _files_needed(self, fragments: Sequence[Fragment], check: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files of `check`, and those that hold an element of `fragments` (ranges of the state's tensors).

        They come in the order of the ranks that wrote them.
        """
        ranks = {file.rank for file in check}
        for fragment in fragments:
            ranks.update(self.manifest.ranks_with(fragment.name, fragment.start, fragment.start + fragment.numel))
        return [self.manifest.files[rank] for rank in sorted(ranks)]

    def faults(self, file: FileEntry, advance: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
        """Verify every byte of one tensor file; return what is wrong, [] for a good file.
        `advance` is called with the number of bytes read since its last call.
        """
        faults = self._size_faults(file)
        if faults == [missing(file.name)]:
            return faults
        try:
            tensors, header_faults = self._tensors(file)
        except TornCheckpoint as error:
            return [*faults, str(error)]

        def verify_request(request: Request) -> list[str]:
            request_faults = self._read(request, lambda tensor, data: None)
            advance(request.size_bytes)
            return request_faults

        faults_of_requests = in_parallel(verify_request, list(requests(file, tensors)), THREADS)
        return [*faults, *header_faults, *itertools.chain(*faults_of_requests)]

    def _size_faults(self, file: FileEntry) -> list[str]:
        """Compare the size of a file with that in its name; return what is wrong, also if the file is missing."""

        def read_once() -> tuple[list[str], str]:
            try:
                size = self._store.size(self.checkpoint.key(file.name))
            except StoreMissing:
                return [missing(file.name)], missing(file.name)
            if size == file.size_bytes:
                return [], ""
            fault = f"{file.name} has {size:,} instead of {file.size_bytes:,} bytes"
            return [fault], fault

        faults, _ = self._store.reread(self.checkpoint.key(file.name), read_once)
        return faults

    def _tensors(self, file: FileEntry) -> tuple[list[TensorEntry], list[str]]:
        """Return the tensors that a file's header lists, and what is wrong with the header ([] if nothing is).
        Raises TornCheckpoint if an undamaged header lists other ranges of parameters than the manifest.
        """
        tensors, fault = self.checkpoint.tensors(file)
        if fault:
            return [], [fault]
        if ranges_of_tensors(file, tensors) != self.manifest.ranges_of(file.rank):
            raise TornCheckpoint(f"the header of {file.name} lists other ranges of parameters than the manifest")
        return tensors, []

    def _read(self, request: Request, use: Callable[[TensorEntry, memoryview], None]) -> list[str]:
        """Read the tensors of a request. Pass each one that matches its digest to `use`; return a line for each other.
        `use` gets little-endian fp32 bytes. If a wrong tensor makes the request be read again, it gets the good ones
        again.
        """
        key = self.checkpoint.key(request.file)
        first_byte = request.tensors[0].offset

        def read_once() -> tuple[list[str], str]:
            try:
                data = self._store.read_range(key, first_byte, request.size_bytes)
            except StoreMissing:
                return [missing(request.file)], missing(request.file)
            faults = []
            for tensor in request.tensors:
                begin = tensor.offset - first_byte
                part = data[begin : begin + tensor.size_bytes]  # shorter if the file was cut off
                found_sha256 = hashlib.sha256(part).hexdigest()
                if len(part) == tensor.size_bytes and found_sha256 == tensor.sha256:
                    use(tensor, part)
                else:
                    where = f"{tensor.kind} of {tensor.name}[{tensor.start}:{tensor.start + tensor.numel}]"
                    faults.append(f"{where} in {request.file} does not match its digest (found {found_sha256[:12]})")
            return faults, "; ".join(faults)

        faults, _ = self._store.reread(key, read_once)
        return faults


class _Destinations:
    """Lookup from a stored tensor to the fragments of a load that share elements with it.
    Several threads may use it at once: the lookup does not change, and no element is in two stored tensors.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
        for fragment in fragments:
            for kind in fragment.views:
                self._fragments[kind, fragment.name].append(fragment)

    def need(self, tensor: TensorEntry) -> bool:
        """Return whether a stored tensor must be read, because a fragment shares elements with it."""
        return len(self._overlapping(tensor)) > 0

    def copy(self, tensor: TensorEntry, data: memoryview) -> None:
        """Copy the verified little-endian fp32 bytes of a stored tensor into the fragments that share its elements."""
        values = torch.frombuffer(data, dtype=torch.float32)
        for fragment in self._overlapping(tensor):
            # The shared elements are [begin, end) of the flattened parameter.
            begin = max(fragment.start, tensor.start)
            end = min(fragment.start + fragment.numel, tensor.start + tensor.numel)
            view = fragment.views[tensor.kind][begin - fragment.start : end - fragment.start]
            view.copy_(values[begin - tensor.start : end - tensor.start])

    def _overlapping(self, tensor: TensorEntry) -> list[Fragment]:
        tensor_end = tensor.start + tensor.numel
        overlapping = []
        for fragment in self._fragments.get((tensor.kind, tensor.name), []):
            fragment_end = fragment.start + fragment.numel
            if fragment.start < tensor_end and tensor.start < fragment_end:
                overlapping.append(fragment)
        return overlapping


def verify(
    checkpoint: Checkpoint, advance: Callable[[int], None] = lambda num_bytes: None
) -> tuple[Manifest | None, list[str]]:
    """Verify every byte of a checkpoint; return its manifest, None if damaged or missing, and a list of what is wrong.
    `advance` is called from several threads, with the number of bytes read since its last call. After a StoreError,
    the checkpoint may still be good.
    """
    try:
        reader = CheckpointReader(checkpoint)
    except (TornCheckpoint, StoreMissing) as error:
        return None, [str(error)]
    return reader.manifest, [fault for file in reader.manifest.files for fault in reader.faults(file, advance)]


class Loaded(NamedTuple):
    """Result of `load_newest`, besides the values that it writes into the fragments."""

    state: RunState | None  # None if the run begins at step 0
    set_aside: list[str]  # a line for the log about each checkpoint that was set aside
    notes: list[str]  # a line for the log about each target that could not be read and has a copy elsewhere


def load_newest(
    targets: Sequence[Store],
    fragments: Sequence[Fragment],
    expected: RunState,
    older_identities: Collection[str] = (),
    stopped: Collection[int] = (),
) -> Loaded:
    """Load the newest good checkpoint into the views of `fragments`, this rank's part of the state. Collective.
    The run begins at step 0 if there is no checkpoint or a rollback has discarded all. `older_identities` are digests
    of this run's identity with older numerics (rounding, random draws) that the user has accepted. `stopped` are the
    skipped steps that the loss guard or a rollback chose: a checkpoint that was trained on one is discarded, and any
    other difference in skipped steps is an error.
    Raises UserError if none of the checkpoints can be used; nothing is renamed then. Raises StoreError if one cannot
    be read and no target has a copy; it is StorageLost, on all ranks, if a later start may read it.
    """

    def read(copy: Checkpoint) -> RunState:
        """Read and verify this rank's `fragments`, and size and header of its share of the files. Collective.
        Returns the checkpoint's run state. If any rank fails, all ranks raise the same error, a damage before any
        other.
        """
        own_error: list[str] | None = None
        try:
            reader = CheckpointReader(copy)
            check_resumable(reader.manifest.state, expected, older_identities, stopped)
            # With W ranks, this rank checks every W-th file.
            faults = reader.fill(fragments, check=reader.manifest.files[dist.get_rank() :: dist.get_world_size()])
            if faults:
                raise TornCheckpoint(faults[0])
        except (TornCheckpoint, StoreError) as error:
            own_error = [_error_of_all(error).__name__, str(error)]
        # Every rank reads another part of the checkpoint, and all ranks must come to the same decision.
        errors = [_ERRORS[name](text) for name, text in filter(None, gather(own_error))]
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, TornCheckpoint))
        return reader.manifest.state

    # Rank 0 alone lists the stores, so that all ranks try the same copies in the same order.
    found = from_rank_0(
        lambda: [[copy.step, copy.attempt, targets.index(copy.store)] for copy in checkpoints(targets)]
    )
    candidates = copies_of_each([Checkpoint(step, attempt, targets[target]) for step, attempt, target in found])
    good, rejected = first_good(candidates, read)
    if good is not None:
        notes = [
            f"{other.url} could not be read: {error}; its copy in {good.copy.store.url} is used"
            for other, error in good.unreadable.items()
        ]
        set_aside = [_set_aside(unusable, error, good.copy) for unusable, error in rejected.items()]
        return Loaded(good.content, set_aside, notes)
    if not all(isinstance(error, Discarded) for error in rejected.values()):
        raise none_is_good(rejected)
    return Loaded(None, [_set_aside(discarded, error, None) for discarded, error in rejected.items()], [])


def _error_of_all(own_error: TornCheckpoint | StoreError) -> type[TornCheckpoint | StoreError]:
    """Return the class of the error that all ranks raise when one rank has met `own_error`."""
    if isinstance(own_error, Discarded):
        return Discarded
    if isinstance(own_error, (TornCheckpoint, StoreMissing)):
        return TornCheckpoint
    return StorageLost if is_worth_waiting_for(own_error) else StoreError


def _set_aside(unusable: Checkpoint, fault: Exception, used: Checkpoint | None) -> str:
    """Rename the manifest of an unusable checkpoint on rank 0, and return the line for the log. Collective.
    `used` is the checkpoint that was loaded instead; None if the run begins again at step 0.
    """
    is_discarded = isinstance(fault, Discarded)
    reason = f"{WITHDRAWN}{fault}" if is_discarded else str(fault)
    from_rank_0(lambda: unusable.set_aside(reason))
    line = f"checkpoint {unusable.url} is set aside: {fault}"
    if used is not None and unusable.step == used.step:
        return (
            f"{line}; the same step is good in {used.store.url}; "
            f"run `electra-dist checkpoint repair {shlex.quote(unusable.store.url)} --from "
            f"{shlex.quote(used.store.url)}` to restore the other copy"
        )
    used_step = 0 if used is None else used.step
    line = f"{line}; step {used_step:,} is used instead, which is {unusable.step - used_step:,} steps earlier"
    return line if is_discarded else f"{line}; check the disk or the storage service if this happens again"
