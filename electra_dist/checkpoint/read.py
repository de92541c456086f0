"""Reading a checkpoint's files by ranges, each tensor checked against its digest before a byte of it is used.

Guarantee: what is handed on is what the manifest promises. `file_faults` and the tensors of a file together look at
every byte of it: its size, its header, its tensors, which have no gaps (`Manifest.check_coverage`). What comes out
wrong is read again a few times, so that a byte flipped on the way costs no good checkpoint.

Cost: tensors that lie side by side are read in one request of up to `REQUEST_BYTES`, `THREADS` at a time, so a rank
holds at most 256 MB; sha256 does 1.5 GB/s on a core.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from electra_dist.checkpoint.manifest import READINGS, FileEntry, Manifest, TensorEntry, read_manifest
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.errors import StoreExhausted, StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store

REQUEST_BYTES = 64 << 20
THREADS = 4


@dataclass(frozen=True)
class Request:
    """Tensors that lie side by side in one file."""

    file: str
    tensors: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes to read."""
        return sum(t.size_bytes for t in self.tensors)


def requests(file: FileEntry, wanted: Callable[[TensorEntry], bool] = lambda tensor: True) -> Iterator[Request]:
    """The wanted tensors of a file, in as few requests as may be."""
    run: list[TensorEntry] = []
    size = 0
    for tensor in file.tensors:
        if run and (not wanted(tensor) or size + tensor.size_bytes > REQUEST_BYTES):
            yield Request(file.name, tuple(run))
            run, size = [], 0
        if wanted(tensor):
            run.append(tensor)
            size += tensor.size_bytes
    if run:
        yield Request(file.name, tuple(run))


def file_faults(store: Store, folder: str, file: FileEntry) -> list[str]:
    """What is wrong with a file's size and header."""
    return _believed(lambda: _file_faults(store, f"{folder}/{file.name}", file))


def _file_faults(store: Store, key: str, file: FileEntry) -> list[str]:
    try:
        header = _read(store, key, 0, file.header_bytes)
        size = store.size(key)
    except StoreMissing:
        return [missing(file.name)]
    faults = [f"{file.name} has {size:,} instead of {file.size_bytes:,} bytes"] if size != file.size_bytes else []
    if hashlib.sha256(header).hexdigest() != file.header_sha256:
        faults.append(f"the header of {file.name} does not match its digest")
    return faults


def read_tensors(
    store: Store, folder: str, request: Request, use: Callable[[TensorEntry, memoryview], None]
) -> list[str]:
    """Read, check, and hand the good ones to `use` (if need be more than once); what is wrong with the others."""
    return _believed(lambda: _read_tensors(store, folder, request, use))


def _read_tensors(
    store: Store, folder: str, request: Request, use: Callable[[TensorEntry, memoryview], None]
) -> list[str]:
    first = request.tensors[0].offset
    try:
        data = _read(store, f"{folder}/{request.file}", first, request.size_bytes)
    except StoreMissing:
        return [missing(request.file)]
    faults = []
    for tensor in request.tensors:
        part = data[tensor.offset - first : tensor.offset - first + tensor.size_bytes]
        if len(part) == tensor.size_bytes and hashlib.sha256(part).hexdigest() == tensor.sha256:
            use(tensor, part)
        else:
            where = f"{tensor.kind} of {tensor.name}[{tensor.start}:{tensor.start + tensor.numel}]"
            faults.append(f"{where} in {request.file} does not match its digest")
    return faults


def fill(
    store: Store, folder: str, manifest: Manifest, fragments: Sequence[Fragment], check: Sequence[FileEntry]
) -> list[str]:
    """Copy into every fragment the ranges that it overlaps; check the size and header of the files in `check`.

    Returns what is wrong; the fragments are then partly overwritten.
    """
    holders = defaultdict[tuple[str, str], list[Fragment]](list)
    for fragment in fragments:
        for kind in fragment.views:
            holders[kind, fragment.name].append(fragment)

    def overlapping(tensor: TensorEntry) -> list[Fragment]:
        end = tensor.start + tensor.numel
        held = holders.get((tensor.kind, tensor.name), ())
        return [f for f in held if f.start < end and tensor.start < f.start + f.numel]

    def use(tensor: TensorEntry, data: memoryview) -> None:
        values = torch.frombuffer(data, dtype=torch.float32)
        for f in overlapping(tensor):
            begin, end = max(f.start, tensor.start), min(f.start + f.numel, tensor.start + tensor.numel)
            view = f.views[tensor.kind][begin - f.start : end - f.start]
            view.copy_(values[begin - tensor.start : end - tensor.start])

    wanted = [r for file in manifest.files for r in requests(file, lambda tensor: bool(overlapping(tensor)))]
    with ThreadPoolExecutor(THREADS) as pool:
        checks = pool.map(lambda file: file_faults(store, folder, file), check)
        reads = pool.map(lambda request: read_tensors(store, folder, request, use), wanted)
        return [fault for faults in (*checks, *reads) for fault in faults]


def verify(
    store: Store, folder: str, advance: Callable[[int], None] = lambda num_bytes: None
) -> tuple[Manifest | None, list[str]]:
    """Every byte of a checkpoint: its manifest if that is good, and everything that is wrong.

    Args:
        advance: told the bytes that were read since it was last told, from several threads.
    """
    try:
        manifest = read_manifest(store, folder)
    except (TornCheckpoint, StoreMissing) as error:
        return None, [str(error)]

    return manifest, [fault for file in manifest.files for fault in verify_file(store, folder, file, advance)]


def verify_file(
    store: Store, folder: str, file: FileEntry, advance: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Everything that is wrong with one file."""

    def check(request: Request) -> list[str]:
        faults = read_tensors(store, folder, request, lambda tensor, data: None)
        advance(request.size_bytes)
        return faults

    faults = file_faults(store, folder, file)
    if faults == [missing(file.name)]:
        return faults
    with ThreadPoolExecutor(THREADS) as pool:
        return faults + [fault for found in pool.map(check, requests(file)) for fault in found]


def missing(file: str) -> str:
    """The fault of a file that is not there."""
    return f"{file} is missing"


def _believed(read: Callable[[], list[str]]) -> list[str]:
    """What was wrong at the last of `READINGS` readings; nothing if one was good."""
    for _ in range(READINGS):
        if not (faults := read()):
            break
    return faults


def _read(store: Store, key: str, start: int, length: int) -> memoryview:
    """A range of an object that a manifest promises. Raises StoreMissing if it is really not there."""
    try:
        return store.read_range(key, start, length, must_exist=True)
    except StoreExhausted:
        if not store.exists(key):
            raise StoreMissing(key) from None
        raise
