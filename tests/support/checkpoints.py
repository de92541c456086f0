"""Small checkpoints for tests and drills: four parameters, partitioned over ranks as ZeRO-1 partitions them.

No engine is needed. The values that a checkpoint must hold are a pure function of (run, step), so a test can compare
any loaded checkpoint with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from electra_dist.checkpoint import reader
from electra_dist.checkpoint.manifest import KINDS, FileEntry, Fragment, Kind, Manifest, RunState, part
from electra_dist.checkpoint.stored_copies import Checkpoint, checkpoints, parse_folder
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store

SHAPES = {"word.weight": [37, 12], "dense.weight": [7, 12], "dense.bias": [7], "back.weight": [12, 7]}
KEEP_ALL = CheckpointConfig(keep_last=10**6)

Content = dict[str, dict[Kind, torch.Tensor]]  # parameter -> kind -> flat values


def content(step: int, run: int = 0) -> Content:
    """Return the values that the checkpoint of `step` of run number `run` must hold."""
    numbers = np.random.default_rng([run, step])
    return {
        name: {kind: torch.from_numpy(numbers.standard_normal(prod(shape), np.float32)) for kind in KINDS}
        for name, shape in SHAPES.items()
    }


def empty() -> Content:
    """Return zeros of the same shapes, as the target of a load."""
    return {name: {kind: torch.zeros(prod(shape)) for kind in KINDS} for name, shape in SHAPES.items()}


def equal(a: Content, b: Content) -> bool:
    """Return whether two contents are equal bit for bit."""
    return all(torch.equal(a[n][k].view(torch.int32), b[n][k].view(torch.int32)) for n in SHAPES for k in KINDS)


def folder_name(step: int, attempt: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}-a{attempt:04d}"


def checkpoint_in(store: Store, folder: str) -> Checkpoint:
    """Return the checkpoint of a folder."""
    step_and_attempt = parse_folder(folder)
    assert step_and_attempt is not None
    return Checkpoint(*step_and_attempt, store)


def committed(store: Store) -> list[tuple[int, int, str]]:
    """Return (step, attempt, folder) of every checkpoint with a manifest in a store, the newest last."""
    return [(found.step, found.attempt, found.folder) for found in reversed(checkpoints([store]))]


def read_manifest(store: Store, folder: str) -> Manifest:
    """Return the manifest of the checkpoint of a folder."""
    return checkpoint_in(store, folder).manifest()


def verify(store: Store, folder: str) -> tuple[Manifest | None, list[str]]:
    """Verify every byte of the checkpoint of a folder."""
    return reader.verify(checkpoint_in(store, folder))


def file_name(rank: int) -> str:
    """Return the name of a tensor file that no save has written."""
    return FileEntry(rank=rank, size_bytes=1, header_bytes=1, header_sha256="0" * 64).name


def file_of(store: Store, step: int, rank: int = 1, attempt: int = 1) -> str:
    """Return the key of the tensor file of a rank in a store's checkpoint."""
    folder = folder_name(step, attempt)
    [key] = [
        key for key in store.list(f"{folder}/rank-{rank:05d}.") if FileEntry.parse(key.removeprefix(f"{folder}/"))
    ]
    return key


def damage(store: Store, key: str, at: int | None = None) -> None:
    """Flip one bit of an object, in the byte `at` or, by default, in its middle byte."""
    data = bytearray(store.read(key))
    data[len(data) // 2 if at is None else at] ^= 1
    store.write(key, bytes(data))


def even_share(values: Content, rank: int, world_size: int) -> list[Fragment]:
    """Return one rank's fragments as ZeRO stages 0 and 3 divide parameters: a part of each one."""
    fragments = []
    for name, shape in SHAPES.items():
        start, end = part(prod(shape), world_size, rank)
        if start < end:
            views = {kind: tensor[start:end] for kind, tensor in values[name].items()}
            fragments.append(Fragment(name=name, start=start, numel=end - start, views=views))
    return fragments


def share(values: Content, rank: int, world_size: int) -> list[Fragment]:
    """Return one rank's fragments: all parameters are laid end to end and cut into `world_size` equal pieces."""
    total = sum(prod(shape) for shape in SHAPES.values())
    share_start = total * rank // world_size
    share_end = total * (rank + 1) // world_size
    fragments = []
    parameter_start = 0
    for name, shape in SHAPES.items():
        numel = prod(shape)
        begin = max(share_start - parameter_start, 0)
        end = min(share_end - parameter_start, numel)
        if begin < end:
            views = {kind: tensor[begin:end] for kind, tensor in values[name].items()}
            fragments.append(Fragment(name=name, start=begin, numel=end - begin, views=views))
        parameter_start += numel
    return fragments


def state_at(step: int, attempt: int = 1, world_size: int = 2, **fields: Any) -> RunState:
    """Return the run state of a checkpoint at `step`; `fields` replace any of its default values."""
    settings: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "identity_sha256": "0" * 64,
        "corpus_fingerprint": "corpus",
        "world_size": world_size,
        "zero_stage": 1,
        "shapes": SHAPES,
        "shared": {"tied.weight": "word.weight"},
        "versions": {"torch": torch.__version__},
        "bit_settings": {},
        "rows_seen": 16 * step,
        "rows_digest": (2**64 - 1) // (step + 1),
        "recent_losses": (1.5, 0.1 + step),
    }
    return RunState(**{**settings, **fields})


def save(
    targets: Sequence[Store],
    step: int,
    attempt: int = 1,
    *,
    world_size: int = 2,
    policy: CheckpointConfig = KEEP_ALL,
    run: int = 0,
    fields: Mapping[str, Any] = {},
) -> RunState:
    """Save one checkpoint with the writers of all ranks in this process and return its run state."""
    values = content(step, run)
    state = state_at(step, attempt, world_size, **fields)
    writers = [CheckpointWriter(targets, rank, policy) for rank in range(world_size)]
    for rank, writer in enumerate(writers):
        fragments = even_share if state.is_divided_evenly else share
        writer.save(state, fragments(values, rank, world_size))
    for writer in writers:
        writer.close()
    return state
