"""Simulate a save of hundreds of ranks in one process: the ranks store their files one after another.

Every rank has a store of its own on the same objects in memory (`CountingStore`), which counts its requests. Only some
ranks write their files to a disk first, because a thousand would take long.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from support import checkpoints as small
from support.checkpoints import folder_name
from support.counting_store import CountingStore, Service

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.retention import retain
from electra_dist.checkpoint.save import Save
from electra_dist.checkpoint.tensor_file import Fragment, Tensor, TensorFile
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import REQUEST_THREADS
from electra_dist.store.local_store import LocalStore

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}


@dataclass(frozen=True, kw_only=True)
class SaveRequests:
    """Stores that have counted the requests of one save, one for each task that a rank can have in it."""

    member: CountingStore  # of rank 1, which only stores its file
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


def fragments_of(state: RunState, values: small.Content, rank: int) -> list[Fragment]:
    """Return the fragments that a rank stores at the ZeRO stage of `state`."""
    share = small.even_share if state.is_divided_evenly else small.share
    return share(values, rank, state.world_size)


def save(service: Service, staging: Path, state: RunState, real_ranks: Container[int] = (0, 1)) -> SaveRequests:
    """Save a checkpoint of `state.world_size` ranks, delete all older checkpoints, and return the counted requests.

    `staging` is the folder in which `real_ranks` write their files before they are stored; rank 0 must be one of them,
    and there must be at least two ranks. The tensors are those of `small.content`.
    """
    values = small.content(state.step)
    stores = [CountingStore(service, REQUEST_THREADS) for _ in range(state.world_size)]  # by rank
    saves = {}
    for rank, store in enumerate(stores):
        tensors = tensors_of(fragments_of(state, values, rank))
        if rank in real_ranks:
            saves[rank] = Save(rank, state, tensors, LocalStore(staging), [store])
            assert saves[rank].store() is None
        else:
            store_file(store, state, rank, tensors)
    assert saves[0].commit(lambda: False) is None
    deletion = CountingStore(service, REQUEST_THREADS)
    retain(deletion, CheckpointConfig(keep_last=1), 0, state.attempt, {})
    return SaveRequests(member=stores[1], commit=stores[0], deletion=deletion)


def store_file(store: CountingStore, state: RunState, rank: int, tensors: list[Tensor]) -> None:
    """Store the file of a rank as if it had uploaded it; the tensors are read, and no file is written."""
    file = TensorFile(rank, tensors)
    data = file.header + b"".join(tensor.values.numpy().tobytes() for tensor in tensors)
    store.write(f"{folder_name(state.step, state.attempt)}/{file.entry.name}", data)
