"""Read parts of a checkpoint's files; check each tensor against its digest before a byte of it is used.

Guarantee: callers receive exactly the bytes that the manifest describes. Every byte of a file is verified: its size
and header by `file_faults`, the rest as tensors, which have no gaps (`Manifest.check_coverage`). A range that does not
match its digest is read again, up to `READINGS` times, so that a bit flipped in transit costs no good checkpoint.

Cost: tensors that are neighbours in a file are read in one request of up to `REQUEST_BYTES`, with `THREADS` requests
at a time, so a rank holds at most 256 MB; sha256 does 1.5 GB/s on a core.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from electra_dist.checkpoint.checkpoint_manifest import READINGS, FileEntry, Manifest, TensorEntry, read_manifest
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.errors import StoreExhausted, StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store

REQUEST_BYTES = 64 << 20  # 64 MiB: limit of one request, unless a single tensor is larger
THREADS = 4  # requests at a time


@dataclass(frozen=True)
class Request:
    """Tensors that follow one another in one file and are read by one request to the store."""

    file: str  # file name in the checkpoint's folder
    tensors: tuple[TensorEntry, ...]  # at least one, in the order of the file

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes to read: the sum over the tensors, because there are no gaps between them."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def requests(file: FileEntry, wanted: Callable[[TensorEntry], bool] = lambda tensor: True) -> Iterator[Request]:
    """Group the wanted tensors of a file into as few read requests as possible, in the order of the file.

    The tensors of one request follow one another in the file and have at most `REQUEST_BYTES` together. A tensor that
    is larger gets a request of its own.

    Args:
        file: manifest entry of the file.
        wanted: returns whether a tensor is to be read; by default all are.
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


def file_faults(store: Store, folder: str, file: FileEntry) -> list[str]:
    """Check the size and the header of a tensor file against its manifest entry; the tensors are not read.

    A faulty header is read again, up to `READINGS` times, because a bit may be flipped in transit.

    Returns:
        One line for each fault, empty for a good file; exactly `[missing(file.name)]` if the file is not there.

    Raises:
        StoreError: the store cannot be read.
    """
    return _repeat_while_faulty(lambda: _file_faults(store, f"{folder}/{file.name}", file))


def _file_faults(store: Store, key: str, file: FileEntry) -> list[str]:
    """Check the size and the header of a tensor file once, without reading again after a fault.

    Returns:
        One line for each fault, empty for a good file; exactly `[missing(file.name)]` if the file is not there.
    """
    try:
        header = _read(store, key, 0, file.header_bytes)
        size = store.size(key)
    except StoreMissing:
        return [missing(file.name)]
    faults = []
    if size != file.size_bytes:
        faults.append(f"{file.name} has {size:,} instead of {file.size_bytes:,} bytes")
    if hashlib.sha256(header).hexdigest() != file.header_sha256:
        faults.append(f"the header of {file.name} does not match its digest")
    return faults


def read_tensors(
    store: Store, folder: str, request: Request, use: Callable[[TensorEntry, memoryview], None]
) -> list[str]:
    """Read the tensors of a request, verify them, and pass the good ones to `use`.

    Args:
        store: the store to read from.
        folder: the checkpoint's folder in the store.
        request: the tensors to read.
        use: receives a tensor's entry and its bytes (little-endian fp32). It may be called several times for the same
            tensor, because the whole request is read again after a fault.

    Returns:
        One line for each tensor that never matched its digest, empty if all are good.

    Raises:
        StoreError: the store cannot be read.
    """
    return _repeat_while_faulty(lambda: _read_tensors(store, folder, request, use))


def _read_tensors(
    store: Store, folder: str, request: Request, use: Callable[[TensorEntry, memoryview], None]
) -> list[str]:
    """Read and verify the tensors of a request once, without reading again after a fault.

    Returns:
        One line for each tensor that does not match its digest; a missing file is one fault.
    """
    first_byte = request.tensors[0].offset
    try:
        data = _read(store, f"{folder}/{request.file}", first_byte, request.size_bytes)
    except StoreMissing:
        return [missing(request.file)]
    faults = []
    for tensor in request.tensors:
        begin = tensor.offset - first_byte
        part = data[begin : begin + tensor.size_bytes]  # shorter if the file was cut off
        if len(part) == tensor.size_bytes and hashlib.sha256(part).hexdigest() == tensor.sha256:
            use(tensor, part)
        else:
            where = f"{tensor.kind} of {tensor.name}[{tensor.start}:{tensor.start + tensor.numel}]"
            faults.append(f"{where} in {request.file} does not match its digest")
    return faults


def fill(
    store: Store, folder: str, manifest: Manifest, fragments: Sequence[Fragment], check: Sequence[FileEntry]
) -> list[str]:
    """Fill ranges of parameters ("fragments") from a checkpoint; each tensor is verified before it is used.

    The ranges in the checkpoint's files may be cut differently; only tensors that share elements with a fragment are
    read. Reads with `THREADS` threads. Not collective.

    Args:
        store: the store to read from.
        folder: the checkpoint's folder in the store.
        manifest: the checkpoint's manifest, from `read_manifest`.
        fragments: ranges of parameters, with the tensors on any device that receive them.
        check: files of the checkpoint whose size and header are checked, too.

    Returns:
        One line for each fault, empty if all is good. With faults the fragments are partly overwritten.

    Raises:
        StoreError: the store cannot be read.
    """
    destinations = _Destinations(fragments)
    needed_requests: list[Request] = []
    for file in manifest.files:
        needed_requests.extend(requests(file, destinations.need))

    def check_file(file: FileEntry) -> list[str]:
        """Return the faults in the size and the header of one file."""
        return file_faults(store, folder, file)

    def read_request(request: Request) -> list[str]:
        """Copy the tensors of one request into the fragments; return the faults of those that are damaged."""
        return read_tensors(store, folder, request, destinations.copy)

    with ThreadPoolExecutor(THREADS) as pool:
        faults_by_file = pool.map(check_file, check)
        faults_by_request = pool.map(read_request, needed_requests)
        return list(itertools.chain(*faults_by_file, *faults_by_request))


class _Destinations:
    """Ranges of parameters ("fragments") that a load fills, with a lookup of those that a stored tensor overlaps.

    Safe to use from several threads: the lookup does not change, and no two stored tensors hold the same elements.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        """Group the fragments by kind (master weight or moment) and parameter."""
        self._fragments: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
        for fragment in fragments:
            for kind in fragment.views:
                self._fragments[kind, fragment.name].append(fragment)

    def need(self, tensor: TensorEntry) -> bool:
        """Return whether at least one fragment shares elements with a stored tensor, so that it must be read."""
        return len(self._overlapping(tensor)) > 0

    def copy(self, tensor: TensorEntry, data: memoryview) -> None:
        """Copy the elements that a stored tensor shares with fragments into the views of these.

        Args:
            tensor: manifest entry of the tensor.
            data: its verified bytes, little-endian fp32.
        """
        values = torch.frombuffer(data, dtype=torch.float32)
        for fragment in self._overlapping(tensor):
            # The shared elements are [begin, end) of the flattened parameter.
            begin = max(fragment.start, tensor.start)
            end = min(fragment.start + fragment.numel, tensor.start + tensor.numel)
            view = fragment.views[tensor.kind][begin - fragment.start : end - fragment.start]
            view.copy_(values[begin - tensor.start : end - tensor.start])

    def _overlapping(self, tensor: TensorEntry) -> list[Fragment]:
        """Return the fragments of the same kind and parameter that share elements with a stored tensor."""
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
    """Verify every byte of a checkpoint: the manifest, then all files. Nothing is changed.

    Args:
        store: the store that holds the checkpoint.
        folder: the checkpoint's folder in the store.
        advance: called with the bytes read since its last call, from several threads.

    Returns:
        The manifest, None if it is damaged or missing; and one line for each fault, empty for a good checkpoint.

    Raises:
        StoreError: the store cannot be read; the checkpoint may be good.
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
    """Verify every byte of one tensor file against its manifest entry.

    Args:
        store: the store that holds the checkpoint.
        folder: the checkpoint's folder in the store.
        file: manifest entry of the file.
        advance: called with the bytes read since its last call, from several threads.

    Returns:
        One line for each fault, empty for a good file. A missing file is one fault.

    Raises:
        StoreError: the store cannot be read.
    """

    def verify_request(request: Request) -> list[str]:
        """Return the faults of the tensors in one request, and report its bytes as read."""
        request_faults = read_tensors(store, folder, request, lambda tensor, data: None)
        advance(request.size_bytes)
        return request_faults

    faults = file_faults(store, folder, file)
    if faults == [missing(file.name)]:
        return faults
    with ThreadPoolExecutor(THREADS) as pool:
        for request_faults in pool.map(verify_request, requests(file)):
            faults.extend(request_faults)
    return faults


def missing(file: str) -> str:
    """Return the line of text that reports a file as missing.

    A caller compares with it to distinguish a missing file from a damaged one.
    """
    return f"{file} is missing"


def _repeat_while_faulty(read: Callable[[], list[str]]) -> list[str]:
    """Call `read`, which reads once and returns the faults, until there are none; return the faults of the last call.

    It is called at most `READINGS` times. A bit that was flipped in transit is good at the next reading, whereas
    damage in the store stays.
    """
    for _ in range(READINGS):
        faults = read()
        if not faults:
            break
    return faults


def _read(store: Store, key: str, start: int, length: int) -> memoryview:
    """Read bytes [start, start + length) of an object that a manifest lists; fewer if the object ends before.

    Raises:
        StoreMissing: the object does not exist. This is checked once more when all retries of the store have failed.
        StoreError: the store cannot be read.
    """
    try:
        return store.read_range(key, start, length, must_exist=True)
    except StoreExhausted:
        if not store.exists(key):
            raise StoreMissing(key) from None
        raise
