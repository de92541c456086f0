"""Simulate a save of hundreds of ranks in one process: the ranks store their files one after another.

Every rank has a store of its own on the same objects in memory (`CountingStore`), which counts its requests. Only some
ranks write a real tensor file, because a thousand files would take long. Each other rank stores an empty file, and the
manifest entry of a file as large as a real one.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from support import checkpoints as small
from support.counting_store import CountingStore, Service

from electra_dist.checkpoint.checkpoint_manifest import FileEntry, RunState, TensorEntry, folder_name
from electra_dist.checkpoint.commit import retain
from electra_dist.checkpoint.many_ranks.file_entries import merge_group, submit
from electra_dist.checkpoint.many_ranks.rank_groups import led_group
from electra_dist.checkpoint.save import Save
from electra_dist.checkpoint.tensor_file import Fragment, Tensor
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import REQUEST_THREADS
from electra_dist.store.local_store import LocalStore

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}


@dataclass(frozen=True, kw_only=True)
class SaveRequests:
    """Stores that have counted the requests of one save, one for each task that a rank can have in it."""

    member: CountingStore  # of rank 1, which only stores its file
    leader: CountingStore | None  # of the first rank that also merges its group's entries; None without groups
    commit: CountingStore  # of rank 0, which stores its file and commits the checkpoint
    deletion: CountingStore  # of rank 0, for the deletion of old checkpoints only


def tensors_of(fragments: list[Fragment]) -> list[Tensor]:
    """Return the tensors that a rank writes for its fragments of parameters, in the order in which its file has them.

    Each fragment gives three tensors: the master weights and both moments of the optimizer.
    """
    return [
        Tensor(kind=kind, name=fragment.name, start=fragment.start, values=fragment.views[kind])
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for fragment in fragments
    ]


def entry_without_file(rank: int, tensors: list[Tensor]) -> FileEntry:
    """Return the manifest entry of a tensor file that is not written: sizes are right, all digests are zeros.

    Args:
        rank: number of the rank.
        tensors: the tensors that the file would have.
    """
    entries = []
    offset = 1000
    for tensor in tensors:
        numel = len(tensor.values)
        entry = TensorEntry(
            kind=tensor.kind, name=tensor.name, start=tensor.start, numel=numel, offset=offset, sha256="0" * 64
        )
        entries.append(entry)
        offset += entry.size_bytes
    return FileEntry(
        name=f"rank-{rank:05d}.safetensors",
        size_bytes=offset,
        header_bytes=1000,
        header_sha256="0" * 64,
        tensors=tuple(entries),
    )


def save(service: Service, staging: Path, state: RunState, real_ranks: Container[int] = (0, 1)) -> SaveRequests:
    """Save a checkpoint of `state.world_size` ranks, delete all older checkpoints, and return the counted requests.

    Args:
        service: holds the objects; the checkpoint is written there.
        staging: folder in which real files are written before they are stored.
        state: step, number of ranks and so on of the checkpoint; its tensors are those of `small.content`.
        real_ranks: ranks that write real files; rank 0 must be one of them. There must be at least two ranks.
    """
    values = small.content(state.step)
    world_size = state.world_size
    folder = folder_name(state.step, state.attempt)
    stores = [CountingStore(service, REQUEST_THREADS) for _ in range(world_size)]  # by rank
    saves = {}
    for rank, store in enumerate(stores):
        tensors = tensors_of(small.share(values, rank, world_size))
        if rank in real_ranks:
            saves[rank] = Save(rank, state, tensors, LocalStore(staging), [store])
            assert saves[rank].store() is None
        else:
            entry = entry_without_file(rank, tensors)
            store.write(f"{folder}/{entry.name}", b"")
            submit(store, folder, rank, state, entry)
    leader = None
    for rank, store in enumerate(stores):
        group = led_group(rank, world_size)
        if group is not None:
            merge_group(store, folder, group, world_size, 60.0, lambda: False)
            if leader is None:
                leader = store
    assert saves[0].commit(lambda: False) is None
    deletion = CountingStore(service, REQUEST_THREADS)
    retain(deletion, CheckpointConfig(keep_last=1), 0, state.attempt, {})
    return SaveRequests(member=stores[1], leader=leader, commit=stores[0], deletion=deletion)
