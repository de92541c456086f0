"""Read parts of a checkpoint's files; check each tensor against its digest before a byte of it is used.

Guarantee: callers receive exactly the bytes that the manifest describes. A file's size and header are verified by
`file_faults`. All of its other bytes are in tensors (`Manifest.check_coverage`), each of which has a digest. A header
or a tensor that does not match its digest is read again, with pauses, and counts as damaged only if two readings agree
(`store/retry.py`); so a bit that was flipped on the way from the store does not count as damage of the checkpoint.
Functions return damage as lines of text, "faults"; one `Rereading` serves all readings of a checkpoint.

A manifest of format 3 does not list the tensors of a file. They are listed in the header of the file, which is read
and verified before its tensors.

Cost: tensors that are neighbours in a file are read by one request of at most `REQUEST_BYTES`. There are `THREADS`
requests at a time, so a rank holds at most 256 MB.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from electra_dist.checkpoint.checkpoint_manifest import FileEntry, Manifest, TensorEntry, read_manifest
from electra_dist.checkpoint.many_ranks.parameter_runs import FilesOfElements, Run
from electra_dist.checkpoint.tensor_file import Fragment, parse_header
from electra_dist.errors import StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.retry import Rereading

REQUEST_BYTES = 64 << 20  # 64 MiB: limit of one request, unless a single tensor is larger
THREADS = 4  # requests at a time


@dataclass(frozen=True)
class Request:
    """One read from a store: tensors of one file that follow one another without a gap, so that one call suffices."""

    file: str  # file name in the checkpoint's folder
    tensors: tuple[TensorEntry, ...]  # at least one, in the order of the file

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes to read."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def requests(file: FileEntry, wanted: Callable[[TensorEntry], bool] = lambda tensor: True) -> Iterator[Request]:
    """Group the tensors of a file that `wanted` accepts into as few reads as possible, in the order of the file.
    A request has at most `REQUEST_BYTES`, unless a single tensor is larger.
    """
    neighbours: list[TensorEntry] = []  # wanted tensors without a gap between them, not yet in a request
    size_bytes = 0  # of the neighbours
    for tensor in file.tensors:
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


def file_faults(store: Store, folder: str, file: FileEntry, rereading: Rereading) -> list[str]:
    """Compare size and header of a tensor file with its manifest entry; return what is wrong, [] for a good file.
    For a missing file the result is exactly `[missing(file.name)]`.
    """
    key = f"{folder}/{file.name}"
    return _repeat_while_faulty(lambda: _file_faults(store, key, file), f"{store.url}/{key}", rereading)


def _file_faults(store: Store, key: str, file: FileEntry) -> list[str]:
    _, header_fault = _read_header(store, key, file)
    try:
        size = store.size(key)
    except StoreMissing:
        return [missing(file.name)]
    faults = []
    if size != file.size_bytes:
        faults.append(f"{file.name} has {size:,} instead of {file.size_bytes:,} bytes")
    if header_fault:
        faults.append(header_fault)
    return faults


def _read_header(store: Store, key: str, file: FileEntry) -> tuple[bytes, str]:
    """Return a tensor file's header (b"" without a file) and what is wrong with it ("" if its digest is right)."""
    try:
        header = bytes(store.read_range(key, 0, file.header_bytes, must_exist=True))
    except StoreMissing:
        return b"", missing(file.name)
    header_sha256 = hashlib.sha256(header).hexdigest()
    if header_sha256 != file.header_sha256:
        return header, f"the header of {file.name} does not match its digest (found {header_sha256[:12]})"
    return header, ""


def read_tensors(
    store: Store,
    folder: str,
    request: Request,
    use: Callable[[TensorEntry, memoryview], None],
    rereading: Rereading,
) -> list[str]:
    """Read the tensors of a request. Pass each one that matches its digest to `use`; return a line for each other one.
    `use` receives little-endian fp32 bytes. If a wrong tensor is read again, `use` receives the good ones again, too.
    """
    name = f"{store.url}/{folder}/{request.file}"
    return _repeat_while_faulty(lambda: _read_tensors(store, folder, request, use), name, rereading)


def _read_tensors(
    store: Store, folder: str, request: Request, use: Callable[[TensorEntry, memoryview], None]
) -> list[str]:
    first_byte = request.tensors[0].offset
    try:
        key = f"{folder}/{request.file}"
        data = store.read_range(key, first_byte, request.size_bytes, must_exist=True)
    except StoreMissing:
        return [missing(request.file)]
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
    return faults


def fill(
    store: Store, folder: str, manifest: Manifest, fragments: Sequence[Fragment], check: Sequence[FileEntry]
) -> list[str]:
    """Read verified values from a checkpoint into the views of `fragments`; return what is wrong, [] if all is good.
    Only stored tensors that share elements with a fragment are read. If something is wrong, the views are partly
    overwritten. Size and header of the files `check` are verified, too; each rank passes its share of all files. Not
    collective.
    """
    destinations = _Destinations(fragments)
    rereading = Rereading(store.reread_pauses_s)
    needed_requests: list[Request] = []
    needed_files = manifest.files if manifest.runs is None else _files_of(manifest.files, manifest.runs, fragments)
    complete_entries, header_faults = with_tensors(store, folder, needed_files, rereading)
    for file in complete_entries:
        needed_requests.extend(requests(file, destinations.need))

    def check_file(file: FileEntry) -> list[str]:
        return file_faults(store, folder, file, rereading)

    def read_request(request: Request) -> list[str]:
        return read_tensors(store, folder, request, destinations.copy, rereading)

    with ThreadPoolExecutor(THREADS) as pool:
        faults_by_file = pool.map(check_file, check)
        faults_by_request = pool.map(read_request, needed_requests)
        return list(itertools.chain(header_faults, *faults_by_file, *faults_by_request))


def _files_of(
    files: Sequence[FileEntry], runs: Mapping[str, Sequence[Run]], fragments: Sequence[Fragment]
) -> list[FileEntry]:
    """Return the files that hold any element of the fragments, for a manifest that lists no tensors (format 3)."""
    file_numbers: set[int] = set()
    for fragment in fragments:
        end = fragment.start + fragment.numel
        file_numbers.update(FilesOfElements(runs[fragment.name]).overlapping(fragment.start, end))
    return [files[number] for number in sorted(file_numbers)]


def with_tensors(
    store: Store, folder: str, files: Sequence[FileEntry], rereading: Rereading
) -> tuple[list[FileEntry], list[str]]:
    """Complete manifest entries that list no tensors (format 3): read the lists from the headers of the files.
    Returns all complete entries, and a line for each file whose header is missing or damaged. Raises TornCheckpoint if
    a header's tensors do not cover its file.
    """

    def complete(file: FileEntry) -> tuple[FileEntry, str]:
        if not file.is_listed_in_header:
            return file, ""
        key = f"{folder}/{file.name}"
        header, fault = rereading.read(f"{store.url}/{key}", lambda: _read_header(store, key, file))
        if fault:
            return file, fault
        return parse_header(file, header), ""

    complete_entries: list[FileEntry] = []
    faults: list[str] = []
    for entry, fault in in_parallel(complete, files):
        if fault:
            faults.append(fault)
        else:
            complete_entries.append(entry)
    return complete_entries, faults


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
    store: Store, folder: str, advance: Callable[[int], None] = lambda num_bytes: None
) -> tuple[Manifest | None, list[str]]:
    """Verify every byte of a checkpoint; return its manifest (None if damaged or missing) and what is wrong.
    `advance` is called from several threads, with the number of bytes read since its last call. After a StoreError,
    the checkpoint may still be good.
    """
    try:
        manifest = read_manifest(store, folder)
    except (TornCheckpoint, StoreMissing) as error:
        return None, [str(error)]
    faults = []
    for file in manifest.files:
        faults.extend(verify_file(store, folder, file, advance))
    return manifest, faults


def verify_file(
    store: Store, folder: str, file: FileEntry, advance: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Verify every byte of one tensor file against its manifest entry; return what is wrong, [] for a good file."""

    def verify_request(request: Request) -> list[str]:
        request_faults = read_tensors(store, folder, request, lambda tensor, data: None, rereading)
        advance(request.size_bytes)
        return request_faults

    rereading = Rereading(store.reread_pauses_s)
    faults = file_faults(store, folder, file, rereading)
    if faults == [missing(file.name)]:
        return faults
    if file.is_listed_in_header:
        if faults:
            return faults  # Only an intact header shows where the tensors are.
        complete_entries, header_faults = with_tensors(store, folder, [file], rereading)
        if header_faults:
            return header_faults
        file = complete_entries[0]
    with ThreadPoolExecutor(THREADS) as pool:
        for request_faults in pool.map(verify_request, requests(file)):
            faults.extend(request_faults)
    return faults


def missing(file: str) -> str:
    """Return the text for a missing file; callers compare with it to tell a missing file from a damaged one."""
    return f"{file} is missing"


def _repeat_while_faulty(read: Callable[[], list[str]], name: str, rereading: Rereading) -> list[str]:
    """Call `read` until it returns no faults, or the same faults twice; return the faults of the last call."""

    def read_once() -> tuple[list[str], str]:
        faults = read()
        return faults, "; ".join(faults)

    faults, _ = rereading.read(name, read_once)
    return faults
