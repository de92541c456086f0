"""Read parts of a checkpoint's files; check each tensor against its digest before a byte of it is used.

Guarantee: callers receive exactly the bytes that the manifest describes. Every byte of a file is verified: its size
and header by `file_faults`, the rest as tensors, which have no gaps (`Manifest.check_coverage`). A range that does not
match its digest is read again, up to `READINGS` times, so that a bit flipped in transit costs no good checkpoint.

Cost: tensors that are neighbours in a file are read in one request of up to `REQUEST_BYTES`, with `THREADS` requests
at a time, so a rank holds at most 256 MB; sha256 does 1.5 GB/s on a core.
"""

from __future__ import annotations

import hashlib
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

    file: str
    tensors: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes to read: the sum over the tensors, because there are no gaps between them."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def requests(file: FileEntry, wanted: Callable[[TensorEntry], bool] = lambda tensor: True) -> Iterator[Request]:
    """Group the wanted tensors of a file into as few read requests as possible, in the order of the file.

    The tensors of one request follow one another in the file and have at most `REQUEST_BYTES` together. A tensor that
    is larger gets a request of its own.
    """
    neighbours: list[TensorEntry] = []
    size_bytes = 0
    for tensor in file.tensors:
        is_wanted = wanted(tensor)
        is_too_much = size_bytes + tensor.size_bytes > REQUEST_BYTES
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

    Returns:
        One line for each fault, empty for a good file; exactly `[missing(file.name)]` if the file is not there.

    Raises:
        StoreError: the store cannot be read.
    """
    return _repeat_while_faulty(lambda: _file_faults(store, f"{folder}/{file.name}", file))


def _file_faults(store: Store, key: str, file: FileEntry) -> list[str]:
    """Check the size and the header of a tensor file once, without reading again after a fault."""
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
    """Read and verify the tensors of a request once, without reading again after a fault."""
    first_byte = request.tensors[0].offset
    try:
        data = _read(store, f"{folder}/{request.file}", first_byte, request.size_bytes)
    except StoreMissing:
        return [missing(request.file)]
    faults = []
    for tensor in request.tensors:
        begin = tensor.offset - first_byte
        part = data[begin : begin + tensor.size_bytes]
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

    Reads with `THREADS` threads. Not collective.

    Args:
        fragments: ranges of parameters, with the tensors on any device that receive them.
        check: files of the checkpoint whose size and header are checked, too.

    Returns:
        One line for each fault, empty if all is good. With faults the fragments are partly overwritten.

    Raises:
        StoreError: the store cannot be read.
    """
    holders = defaultdict[tuple[str, str], list[Fragment]](list)
    for fragment in fragments:
        for kind in fragment.views:
            holders[kind, fragment.name].append(fragment)

    def overlapping(tensor: TensorEntry) -> list[Fragment]:
        """Return the fragments that share elements with this tensor."""
        end = tensor.start + tensor.numel
        candidates = holders.get((tensor.kind, tensor.name), ())
        return [
            fragment
            for fragment in candidates
            if fragment.start < end and tensor.start < fragment.start + fragment.numel
        ]

    def copy_to_fragments(tensor: TensorEntry, data: memoryview) -> None:
        """Copy the bytes of a verified tensor into all fragments that share elements with it. Threads call it."""
        values = torch.frombuffer(data, dtype=torch.float32)
        for fragment in overlapping(tensor):
            begin = max(fragment.start, tensor.start)
            end = min(fragment.start + fragment.numel, tensor.start + tensor.numel)
            view = fragment.views[tensor.kind][begin - fragment.start : end - fragment.start]
            view.copy_(values[begin - tensor.start : end - tensor.start])

    needed = [
        request for file in manifest.files for request in requests(file, lambda tensor: bool(overlapping(tensor)))
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        checks = pool.map(lambda file: file_faults(store, folder, file), check)
        reads = pool.map(lambda request: read_tensors(store, folder, request, copy_to_fragments), needed)
        return [fault for faults in (*checks, *reads) for fault in faults]


def verify(
    store: Store, folder: str, advance: Callable[[int], None] = lambda num_bytes: None
) -> tuple[Manifest | None, list[str]]:
    """Verify every byte of a checkpoint: the manifest, then all files. Nothing is changed.

    Args:
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
    return manifest, [fault for file in manifest.files for fault in verify_file(store, folder, file, advance)]


def verify_file(
    store: Store, folder: str, file: FileEntry, advance: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Verify every byte of one tensor file against its manifest entry.

    Args:
        advance: called with the bytes read since its last call, from several threads.

    Returns:
        One line for each fault, empty for a good file. A missing file is one fault.

    Raises:
        StoreError: the store cannot be read.
    """

    def check(request: Request) -> list[str]:
        """Verify the tensors of a request and report its bytes as read."""
        faults = read_tensors(store, folder, request, lambda tensor, data: None)
        advance(request.size_bytes)
        return faults

    faults = file_faults(store, folder, file)
    if faults == [missing(file.name)]:
        return faults
    with ThreadPoolExecutor(THREADS) as pool:
        tensor_faults = [fault for found in pool.map(check, requests(file)) for fault in found]
    return faults + tensor_faults


def missing(file: str) -> str:
    """Return the line that reports a file as missing; `file_faults` and `read_tensors` use it."""
    return f"{file} is missing"


def _repeat_while_faulty(read: Callable[[], list[str]]) -> list[str]:
    """Call `read`, which returns its faults, until it returns none, at most `READINGS` times; return the last ones."""
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
