"""Rehearses a save of hundreds of ranks in one process: the ranks store their files one after another.

Every rank has a view of its own on a store in memory (`CountingStore`), which counts its requests. Only some ranks
write a real file, because a thousand files would take long; the others store an empty one and the entry of a real one.
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
    """Requests that one save took, by the ranks' part in it."""

    member: CountingStore  # a rank that only stores its file
    leader: CountingStore | None  # a rank that also merges the entries of its group; None without groups
    commit: CountingStore  # rank 0, until the checkpoint is committed
    deletion: CountingStore  # rank 0, for the deletion of old checkpoints


def tensors_of(fragments: list[Fragment]) -> list[Tensor]:
    """Return the tensors that a rank writes for its fragments, in the order of the file."""
    return [
        Tensor(kind=kind, name=fragment.name, start=fragment.start, values=fragment.views[kind])
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for fragment in fragments
    ]


def entry_without_file(rank: int, tensors: list[Tensor]) -> FileEntry:
    """Return the entry of a rank's file that is not written: its digests are of nothing."""
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
    """Save a checkpoint of `state.world_size` ranks, the contents of which are those of `small.content`.

    Afterwards all checkpoints but this one are deleted. `real_ranks` write real files; rank 0 has to be one of them.
    """
    values = small.content(state.step)
    world_size = state.world_size
    folder = folder_name(state.step, state.attempt)
    views = [CountingStore(service, REQUEST_THREADS) for _ in range(world_size)]
    saves = {}
    for rank, view in enumerate(views):
        tensors = tensors_of(small.share(values, rank, world_size))
        if rank in real_ranks:
            saves[rank] = Save(rank, state, tensors, LocalStore(staging), [view])
            assert saves[rank].store() is None
        else:
            entry = entry_without_file(rank, tensors)
            view.write(f"{folder}/{entry.name}", b"")
            submit(view, folder, rank, state, entry)
    leaders = {}
    for rank, view in enumerate(views):
        group = led_group(rank, world_size)
        if group is not None:
            leaders[rank] = view
            merge_group(view, folder, group, world_size, 60.0, lambda: False)
    assert saves[0].commit(lambda: False) is None
    deletion = CountingStore(service, REQUEST_THREADS)
    retain(deletion, CheckpointConfig(keep_last=1), 0, state.attempt, {})
    return SaveRequests(
        member=views[1],
        leader=next(iter(leaders.values()), None),
        commit=views[0],
        deletion=deletion,
    )
