"""Load the newest committed checkpoint that is good, at any world size and any ZeRO stage.

Guarantee: each rank reads only the ranges of parameters that it holds, and verifies them while it reads. Together the
ranks have verified every byte before training goes on. A checkpoint that is damaged, incomplete or of another run is
reported, and set aside (renamed, not deleted) once a good one is loaded. The next one to be tried is its copy in
another target (a store that receives every checkpoint), then the next older one. All ranks load the same checkpoint.
If there are checkpoints and none is good, the run ends instead of beginning again; only after a rollback that has
discarded all of them, it begins again at step 0. No pickle is read.

A checkpoint that cannot be read at all (the service is down, a permission is missing) does not count as damaged. A
target that is away is waited for as long as its patience allows, but not before the copies in all other targets were
tried. If no copy can be read, the run ends with the store's error instead of losing steps.

Limits: the listing at the beginning waits for every target, because one that is away may have the newest checkpoint.

Cost: at stages 1 to 3 the ranks together read the checkpoint once, except that each rank that holds a part of a stored
tensor reads the whole tensor. At stage 0 every rank reads all of the checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.owner import Discarded, check_resumable, none_is_good
from electra_dist.checkpoint.reader import CheckpointReader
from electra_dist.checkpoint.stored_copies import (
    WITHDRAWN,
    Checkpoint,
    checkpoints,
    copies_of_each,
    first_good,
)
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import StorageLost, StoreError, StoreMissing, TornCheckpoint
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store

# Errors of which one is raised on all ranks if a rank cannot load a checkpoint, by the names that ranks exchange. The
# first two prove damage, or that the checkpoint is of no use to this run; after the others it may be good.
_ERRORS: Mapping[str, type[TornCheckpoint | StoreError]] = {
    error.__name__: error for error in (Discarded, TornCheckpoint, StorageLost, StoreError)
}


class Loaded(NamedTuple):
    """Result of `load_newest`, besides the values that it writes into the fragments."""

    state: RunState | None  # None if the run begins at step 0
    set_aside: list[str]  # a line for the log about each checkpoint that was set aside
    notes: list[str]  # a line for the log about each target that could not be read and has a copy elsewhere


def load_newest(
    targets: Sequence[Store],
    fragments: Sequence[Fragment],
    expected: RunState,
    older_identities: Collection[str] = (),
    stopped: Collection[int] = (),
) -> Loaded:
    """Load the newest good checkpoint into the views of `fragments`, this rank's part of the state. Collective.
    The run begins at step 0 if there is no checkpoint or a rollback has discarded all. `older_identities` are digests
    of this run's identity with older numerics (rounding, random draws) that the user has accepted. `stopped` are the
    skipped steps that the loss guard or a rollback chose: a checkpoint that was trained on one is discarded, and any
    other difference in skipped steps is an error.
    Raises UserError if none of the checkpoints can be used; nothing is renamed then. Raises StoreError if one cannot
    be read and no target has a copy; it is StorageLost, on all ranks, if a later start may read it.
    """
    # Rank 0 alone lists the stores, so that all ranks try the same copies in the same order.
    found = from_rank_0(
        lambda: [[copy.step, copy.attempt, targets.index(copy.store)] for copy in checkpoints(targets)]
    )
    candidates = copies_of_each([Checkpoint(step, attempt, targets[target]) for step, attempt, target in found])
    good, rejected = first_good(candidates, lambda copy: _read(copy, fragments, expected, older_identities, stopped))
    if good is not None:
        notes = [
            f"{other.url} could not be read: {error}; its copy in {good.copy.store.url} is used"
            for other, error in good.unreadable.items()
        ]
        set_aside = [_set_aside(unusable, error, good.copy) for unusable, error in rejected.items()]
        return Loaded(good.content, set_aside, notes)
    if not all(isinstance(error, Discarded) for error in rejected.values()):
        raise none_is_good(rejected)
    return Loaded(None, [_set_aside(discarded, error, None) for discarded, error in rejected.items()], [])


def _read(
    checkpoint: Checkpoint,
    fragments: Sequence[Fragment],
    expected: RunState,
    older_identities: Collection[str],
    stopped: Collection[int],
) -> RunState:
    """Read and verify this rank's `fragments`, and size and header of its share of the files. Collective.
    Returns the checkpoint's run state. If any rank fails, all ranks raise the same error, a damage before any other.
    """
    own_error: list[str] | None = None
    try:
        reader = CheckpointReader(checkpoint)
        check_resumable(reader.manifest.state, expected, older_identities, stopped)
        # With W ranks, this rank checks every W-th file.
        faults = reader.fill(fragments, check=reader.manifest.files[dist.get_rank() :: dist.get_world_size()])
        if faults:
            raise TornCheckpoint(faults[0])
    except (TornCheckpoint, StoreError) as error:
        own_error = [_error_of_all(error).__name__, str(error)]
    # Every rank reads another part of the checkpoint, and all ranks must come to the same decision.
    errors = [_ERRORS[name](text) for name, text in filter(None, gather(own_error))]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, TornCheckpoint))
    return reader.manifest.state


def _error_of_all(own_error: TornCheckpoint | StoreError) -> type[TornCheckpoint | StoreError]:
    """Return the class of the error that all ranks raise when one rank has met `own_error`."""
    if isinstance(own_error, Discarded):
        return Discarded
    if isinstance(own_error, (TornCheckpoint, StoreMissing)):
        return TornCheckpoint
    return StorageLost if is_worth_waiting_for(own_error) else StoreError


def _set_aside(unusable: Checkpoint, fault: Exception, used: Checkpoint | None) -> str:
    """Rename the manifest of an unusable checkpoint on rank 0, and return the line for the log. Collective.
    `used` is the checkpoint that was loaded instead; None if the run begins again at step 0.
    """
    is_discarded = isinstance(fault, Discarded)
    reason = f"{WITHDRAWN}{fault}" if is_discarded else str(fault)
    from_rank_0(lambda: unusable.set_aside(reason))
    line = f"checkpoint {unusable.url} is set aside: {fault}"
    if used is not None and unusable.step == used.step:
        return (
            f"{line}; the same step is good in {used.store.url}; "
            f"run `electra-dist checkpoint repair {shlex.quote(unusable.store.url)} --from "
            f"{shlex.quote(used.store.url)}` to restore the other copy"
        )
    used_step = 0 if used is None else used.step
    line = f"{line}; step {used_step:,} is used instead, which is {unusable.step - used_step:,} steps earlier"
    return line if is_discarded else f"{line}; check the disk or the storage service if this happens again"
