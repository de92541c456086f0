"""Simulate a save of hundreds of ranks in one process: the ranks store their files one after another.

Every rank has a store of its own on the same objects in memory (`CountingStore`), which counts its requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from support import checkpoints as small
from support.counting_store import CountingStore, Service

from electra_dist.checkpoint.commit import commit, retain
from electra_dist.checkpoint.manifest import Fragment, RunState
from electra_dist.checkpoint.stored_copies import Checkpoint
from electra_dist.checkpoint.writer import Tensor, TensorFile
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import REQUEST_THREADS, Store

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


def save(service: Service, state: RunState) -> SaveRequests:
    """Save a checkpoint of `state.world_size` ranks, at least two, and delete all older ones; return the requests.
    The tensors are those of `small.content`.
    """
    values = small.content(state.step)
    stores = [CountingStore(service, REQUEST_THREADS) for _ in range(state.world_size)]  # by rank
    for rank, store in enumerate(stores):
        store_file(store, state, rank, tensors_of(fragments_of(state, values, rank)))
    commit(stores[0], state, "2026-01-01T00:00:00+00:00")
    deletion = CountingStore(service, REQUEST_THREADS)
    retain(deletion, CheckpointConfig(keep_last=1), 0, state.attempt, {})
    return SaveRequests(member=stores[1], commit=stores[0], deletion=deletion)


def store_file(store: Store, state: RunState, rank: int, tensors: list[Tensor]) -> None:
    """Store the file of a rank as its writer does."""
    file = TensorFile(rank, tensors)
    store.write_pieces(Checkpoint(state.step, state.attempt, store).key(file.entry.name), file.pieces)
