"""Measure what rank 0 does for checkpoints of ELECTRA-Large on 64, 512 and 1,024 ranks: requests and processor time.

    python benchmarks/many_ranks.py            # a rehearsal in one process; the store is in memory

For each number of ranks and the ZeRO stages 1 and 3: a commit (without rank 0's own file), the deletion of an older
checkpoint, the reading of the manifest in a restore, and a start that finds a leftover file of every rank.

How: the headers of all ranks' files are made from the parameters' shapes, and no tensor is written. A store counts its
requests (`tests/support/counting_store.py`) and answers at once, so the seconds are those of the program alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from measure import REPOSITORY, Json, ResultLine, finish, parser, print_table
from rich.progress import track

from electra_dist.checkpoint.commit import begin_attempt, commit
from electra_dist.checkpoint.manifest import (
    KINDS,
    MANIFEST,
    FileEntry,
    Manifest,
    part,
)
from electra_dist.checkpoint.retention import retain
from electra_dist.config import CheckpointConfig
from electra_dist.config_file import load_config
from electra_dist.model.towers import ElectraTowers

sys.path.append(str(REPOSITORY / "tests"))
from support import checkpoints, many_ranks
from support.counting_store import CountingStore, Service

PIECE = 1 << 22  # Largest number of elements of a tensor in a rank's file.
DIGEST = "ab" * 32

Shapes = dict[str, list[int]]


class Work(NamedTuple):
    """What rank 0 did in one phase."""

    phase: str
    requests: int
    serial: int  # Requests that are waited for one after another.
    cpu_s: float  # Processor seconds.


def shapes_of(config_name: str) -> Shapes:
    """Return the shapes of the parameters of both towers, by name, without allocating them."""
    config = load_config(REPOSITORY / "configs" / config_name, ["data.corpus=/none"])
    with torch.device("meta"):
        towers = ElectraTowers(config.model, config.objective)
    return {f"towers.{name}": list(parameter.shape) for name, parameter in towers.named_parameters()}


def fragments(shapes: Shapes, stage: int, rank: int, num_ranks: int) -> Iterator[tuple[str, int, int]]:
    """Yield (parameter, first element, number of elements) of each part that a rank stores.

    At stage 3 every parameter is divided over the ranks. At stage 1 all parameters, laid end to end, are divided once.
    """
    if stage == 3:
        for name, shape in shapes.items():
            first, end = part(math.prod(shape), num_ranks, rank)
            if first < end:
                yield name, first, end - first
        return
    total = sum(math.prod(shape) for shape in shapes.values())
    begin, end = total * rank // num_ranks, total * (rank + 1) // num_ranks
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        first, last = max(begin - offset, 0), min(end - offset, numel)
        if first < last:
            yield name, first, last - first
        offset += numel


class HeaderOnly:
    """Tensor file of a rank of which only the header exists; its size is that of the whole file."""

    def __init__(self, shapes: Shapes, stage: int, rank: int, num_ranks: int) -> None:
        table: Json = {}
        offset = 0
        parts = list(fragments(shapes, stage, rank, num_ranks))
        for kind in KINDS:
            for name, first, num_elements in parts:
                for piece in range(0, num_elements, PIECE):
                    numel = min(PIECE, num_elements - piece)
                    offsets = [offset, offset + 4 * numel]
                    table[f"{kind}|{name}|{first + piece}"] = {
                        "dtype": "F32",
                        "shape": [numel],
                        "data_offsets": offsets,
                    }
                    offset += 4 * numel
        tree = {"__metadata__": {"sha256": DIGEST * len(table)}, **table}
        text = json.dumps(tree, separators=(",", ":")).encode()
        self._header = len(text).to_bytes(8, "little") + text
        self.entry = FileEntry(
            rank=rank,
            size_bytes=len(self._header) + offset,
            header_bytes=len(self._header),
            header_sha256=hashlib.sha256(self._header).hexdigest(),
        )

    def __len__(self) -> int:
        return self.entry.size_bytes

    def __getitem__(self, part_of_file: slice) -> bytes:
        return self._header[part_of_file]


def work(phase: str, store: CountingStore, call: Callable[[], object]) -> Work:
    """Run one phase of rank 0 and return what it took."""
    begin = time.process_time()
    call()
    return Work(phase, store.num_requests, store.num_serial, time.process_time() - begin)


def rehearse(shapes: Shapes, stage: int, num_ranks: int) -> tuple[list[Work], int]:
    """Save, delete, restore and start again with checkpoints of so many ranks.

    Returns:
        The work of rank 0 in each phase, and the size of the manifest in bytes.
    """
    service = Service()
    begin_attempt([CountingStore(service)], many_ranks.RUN)
    old = checkpoints.folder_name(5, 1)
    for name in [*(checkpoints.file_name(rank) for rank in range(num_ranks)), MANIFEST]:
        service.objects[f"{old}/{name}"] = b"x"
    state = checkpoints.state_at(10, world_size=num_ranks, zero_stage=stage, shapes=shapes)
    folder = checkpoints.folder_name(state.step, state.attempt)
    for rank in track(range(num_ranks), f"ZeRO {stage}, {num_ranks:,} ranks", transient=True):
        file = HeaderOnly(shapes, stage, rank, num_ranks)
        service.objects[f"{folder}/{file.entry.name}"] = file  # type: ignore[assignment]
    store, deletion, restore, start = (CountingStore(service, many_ranks.REQUEST_THREADS) for _ in range(4))
    saved_at = "2026-01-01T00:00:00+00:00"
    works = [work("save", store, lambda: commit(store, state, saved_at))]
    works.append(
        work("deletion", deletion, lambda: retain(deletion, CheckpointConfig(keep_last=1), 0, state.attempt, {}))
    )
    works.append(work("restore", restore, lambda: Manifest.parse(restore.read(f"{folder}/{MANIFEST}"))))
    for rank in range(num_ranks):
        service.objects[f"{checkpoints.folder_name(20, 1)}/{checkpoints.file_name(rank)}"] = b"x"
    works.append(work("start", start, lambda: begin_attempt([start], many_ranks.RUN)))
    return works, len(service.objects[f"{folder}/{MANIFEST}"])


def main(argv: Sequence[str] | None = None) -> Json:
    """Rehearse all sizes, print a table, and return the record, which `--save` also writes."""
    args = parser(__doc__).parse_args(argv)
    shapes = shapes_of("demo_cpu.yaml" if args.smoke else "large_25pct_mask.yaml")
    sizes = (64,) if args.smoke else (64, 512, 1024)
    cases: list[Json] = []
    for stage in (1, 3):
        for num_ranks in sizes:
            works, manifest_bytes = rehearse(shapes, stage, num_ranks)
            case: Json = {"stage": stage, "ranks": num_ranks, "manifest_bytes": manifest_bytes}
            for done in works:
                case[done.phase] = {
                    "requests": done.requests,
                    "serial": done.serial,
                    "cpu_s": round(done.cpu_s, 4),
                }
            cases.append(case)
    phases = ("save", "deletion", "restore", "start")
    rows = [
        (
            f"ZeRO {case['stage']}, {case['ranks']:,} ranks",
            f"{case['manifest_bytes'] / 1e6:.2f}",
            *(f"{case[phase]['requests']} ({case[phase]['serial']})" for phase in phases),
            *(f"{case[phase]['cpu_s']:.3f}" for phase in phases),
        )
        for case in cases
    ]
    print_table(
        (
            "",
            "manifest MB",
            *(f"{phase}: requests (serial)" for phase in phases),
            *(f"{phase}: s" for phase in phases),
        ),
        rows,
    )
    largest = cases[-1]
    line = ResultLine(
        f"checkpoint of ELECTRA-Large at ZeRO 3 on {largest['ranks']:,} ranks: processor time of rank 0 to commit it",
        f"{largest['save']['cpu_s']:.2f} s, {largest['save']['serial']} requests one after another",
        "",
    )
    return finish("many_ranks", args, argv, [line], cases=cases)


if __name__ == "__main__":
    main()
