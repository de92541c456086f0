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

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from electra_dist.checkpoint.checkpoint import (
    SET_ASIDE,
    SET_ASIDE_REASON,
    WITHDRAWN,
    Checkpoint,
    Owner,
    checkpoints,
    copies_of_each,
    tries,
)
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.reader import CheckpointReader
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import StorageLost, StoreError, StoreMissing, TornCheckpoint, UserError
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store

# Fields of RunState in which a checkpoint must equal the run, too -> what differs otherwise, for the message.
_FURTHER_FIELDS_OF_A_RUN = {
    "shapes": "other parameter shapes",
    "shared": "other shared parameters",
}


class _Discarded(TornCheckpoint):
    """Error for a checkpoint that a later rollback has discarded: it was trained on steps that the run now skips."""


class _Fault(NamedTuple):
    """Why a rank cannot load a checkpoint: the checkpoint has a fault, or its store cannot be read."""

    text: str
    proves_damage: bool  # False: the store could not be read, and the checkpoint may be good
    is_discarded: bool = False  # whether a rollback of this run has discarded it, so that nothing is wrong with it
    is_away: bool = False  # whether the store may be readable again within minutes


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
    rejected: dict[Checkpoint, _Fault] = {}  # damaged or discarded checkpoints
    for copies in _candidates(targets):
        unreadable: dict[Checkpoint, _Fault] = {}
        for copy, limit_s in tries(copies):
            if copy in rejected or (copy in unreadable and not unreadable[copy].is_away):
                continue  # another try would not help
            state, fault = _read(copy, limit_s, fragments, expected, older_identities, stopped)
            unreadable.pop(copy, None)
            if fault is None:
                assert state is not None
                notes = [
                    f"{other.url} could not be read: {reason.text}; its copy in {copy.store.url} is used"
                    for other, reason in unreadable.items()
                ]
                set_aside = [_set_aside(unusable, reason, copy) for unusable, reason in rejected.items()]
                return Loaded(state, set_aside, notes)
            if fault.proves_damage:
                rejected[copy] = fault
            else:
                unreadable[copy] = fault
        for fault in sorted(unreadable.values(), key=lambda fault: not fault.is_away):
            # An older checkpoint would lose steps.
            error_class = StorageLost if fault.is_away else StoreError
            raise error_class(fault.text)
    if not all(fault.is_discarded for fault in rejected.values()):
        raise _none_is_good(rejected)
    return Loaded(None, [_set_aside(discarded, fault, None) for discarded, fault in rejected.items()], [])


def _read(
    checkpoint: Checkpoint,
    limit_s: float,
    fragments: Sequence[Fragment],
    expected: RunState,
    older_identities: Collection[str],
    stopped: Collection[int],
) -> tuple[RunState | None, _Fault | None]:
    """Read a checkpoint on all ranks; wait for its target at most `limit_s` seconds. Collective.
    Returns the checkpoint's state and None, or None and one fault for all ranks. If ranks find different faults, a
    damaged checkpoint counts before any other.
    """
    with checkpoint.store.patience.at_most(limit_s):
        state, own_fault = _read_own_part(checkpoint, fragments, expected, older_identities, stopped)
    # Every rank reads another part of the checkpoint, and all ranks must come to the same decision.
    own_fields: list[Any] | None = None if own_fault is None else list(own_fault)
    faults = [_Fault(*fields) for fields in gather(own_fields) if fields is not None]
    damages = [fault for fault in faults if fault.proves_damage]
    return state, next(iter(damages + faults), None)


def _candidates(targets: Sequence[Store]) -> list[list[Checkpoint]]:
    """Return the checkpoints that rank 0 finds, newest first, each with its copies in all targets. Collective."""

    def find() -> list[list[int]]:
        return [
            [checkpoint.step, checkpoint.attempt, targets.index(checkpoint.store)]
            for checkpoint in checkpoints(targets)
        ]

    return copies_of_each([Checkpoint(step, attempt, targets[target]) for step, attempt, target in from_rank_0(find)])


def set_all_aside(targets: Sequence[Store]) -> list[str]:
    """Rename the manifest of every checkpoint in all stores, so that a run begins again at step 0; return log lines.
    A checkpoint whose manifest was renamed before is marked, too, so that no repair restores it. Tensor files stay.
    Call it on rank 0 only, while no save is under way.
    """
    reason = f"{WITHDRAWN}the run was begun again from scratch"
    lines = []
    for target in targets:
        for key in target.list("step-"):
            folder, _, name = key.partition("/")
            if name == SET_ASIDE:  # as damaged, by an earlier load; it must not be restored either
                target.write(f"{folder}/{SET_ASIDE_REASON}", f"{reason}\n".encode())
        for checkpoint in reversed(checkpoints([target])):
            checkpoint.set_aside(reason)
            lines.append(f"checkpoint {checkpoint.url} is set aside, because the run begins again from scratch")
    return lines


def check_belongs(
    found: RunState, expected: RunState, older_identities: Collection[str] = (), stopped: Collection[int] = ()
) -> None:
    """Raise TornCheckpoint if this run cannot resume from a checkpoint: another run wrote it, or skipped steps differ.
    Skipped steps after the checkpoint do not matter, nor do its step and world size. The error is `_Discarded` if the
    difference comes from a rollback of this run: the checkpoint was trained on steps that `stopped` contains.
    """
    identities = frozenset([expected.identity_sha256, *older_identities])
    fault = Owner(identities, frozenset([expected.corpus_fingerprint])).fault(found)
    for field, description in _FURTHER_FIELDS_OF_A_RUN.items():
        if not fault and getattr(found, field) != getattr(expected, field):
            fault = f"a run with {description} wrote it"
    if fault:
        raise TornCheckpoint(
            f"this run cannot resume from the checkpoint, because {fault}; set run_dir and checkpoint.targets to "
            f"folders that only this run uses"
        )
    # Steps that the run will skip after the checkpoint do not matter to it.
    expected_skips = tuple(step for step in expected.skipped if step < found.step)
    if found.skipped != expected_skips:
        trained_on = set(expected_skips) - set(found.skipped)
        if set(found.skipped) < set(expected_skips) and trained_on <= set(stopped):
            raise _Discarded("a rollback has discarded it, because it was trained on steps that the run skips since")
        raise TornCheckpoint(
            "this run skips other steps now than the run that wrote the checkpoint did up to its step; restore "
            "train.skip_steps in the config and skipped_steps.json in the run folder"
        )


def _read_own_part(
    checkpoint: Checkpoint,
    fragments: Sequence[Fragment],
    expected: RunState,
    older_identities: Collection[str],
    stopped: Collection[int],
) -> tuple[RunState | None, _Fault | None]:
    """Read and verify this rank's `fragments`; check size and header of its share of the files. Not collective.
    Returns the checkpoint's state and None, or None and the first fault.
    """
    try:
        reader = CheckpointReader(checkpoint)
        state = reader.manifest.state
        check_belongs(state, expected, older_identities, stopped)
        # With W ranks, this rank checks every W-th file.
        faults = reader.fill(fragments, check=reader.manifest.files[dist.get_rank() :: dist.get_world_size()])
    except (TornCheckpoint, StoreMissing) as error:
        return None, _Fault(str(error), proves_damage=True, is_discarded=isinstance(error, _Discarded))
    except StoreError as error:
        return None, _Fault(str(error), proves_damage=False, is_away=is_worth_waiting_for(error))
    if faults:
        return None, _Fault(faults[0], proves_damage=True)
    return state, None


def _set_aside(unusable: Checkpoint, fault: _Fault, used: Checkpoint | None) -> str:
    """Rename the manifest of an unusable checkpoint on rank 0, and return the line for the log. Collective.
    `used` is the checkpoint that was loaded instead; None if the run begins again at step 0.
    """
    reason = f"{WITHDRAWN}{fault.text}" if fault.is_discarded else fault.text
    from_rank_0(lambda: unusable.set_aside(reason))
    line = f"checkpoint {unusable.url} is set aside: {fault.text}"
    if used is not None and unusable.step == used.step:
        return (
            f"{line}; the same step is good in {used.store.url}; "
            f"run `electra-dist checkpoint repair` to restore the other copy"
        )
    used_step = 0 if used is None else used.step
    line = f"{line}; step {used_step:,} is used instead, so {unusable.step - used_step:,} steps are repeated"
    return line if fault.is_discarded else f"{line}; check the disk or the storage service if this happens again"


def _none_is_good(rejected: Mapping[Checkpoint, _Fault]) -> UserError:
    faults = "; ".join(f"{checkpoint.url}: {fault.text}" for checkpoint, fault in rejected.items())
    return UserError(
        f"none of the {len(rejected)} checkpoints of the run can be used ({faults}); if there is a copy elsewhere, "
        f"run `electra-dist checkpoint repair RUN --from URL`, or begin again at step 0 with the option "
        f"--from-scratch of launcher/pretrain.py, which deletes nothing"
    )
