"""Loading: the newest committed checkpoint whose every byte is what its manifest says, at any world size and stage.

Guarantee: each rank reads just the ranges that it holds and verifies them while it reads, so that all ranks together
verify every byte, before training goes on. A checkpoint that is torn, flipped, short, or of another run is named, set
aside (renamed, not deleted) where it is, and the same one of another target, then the next older one is tried. All
ranks take the same one. No pickle is read.

What cannot be read at all (a service that is down, a right that is missing) is no damage: another target's copy is
taken, and if there is none the run ends with the store's error instead of losing steps.

Cost: at stages 1 to 3 the ranks together read the checkpoint once (a tensor of which two ranks hold parts, twice); at
stage 0 every rank reads all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from electra_dist.checkpoint.manifest import RunState, committed, read_manifest, set_aside
from electra_dist.checkpoint.read import fill
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import StoreError, StoreMissing, TornCheckpoint, UserError
from electra_dist.store.interface import Store


def load_newest(
    targets: Sequence[Store], fragments: Sequence[Fragment], expected: RunState
) -> tuple[RunState | None, list[str]]:
    """Overwrite `fragments` with the newest good checkpoint. Collective.

    Args:
        targets: where checkpoints are, the preferred one first.
        expected: what this run is (identity, corpus, shapes, skipped steps); its step and world size are not compared.

    Returns:
        The state found, None if there is none; and one line for each checkpoint that was set aside. With None and such
        lines the fragments hold anything: the caller initialises them again.

    Raises:
        StoreError: a checkpoint cannot be read, and no other target has it.
    """
    bad: list[tuple[int, str]] = []  # step, what is wrong
    unread: tuple[int, int, str] | None = None  # step, attempt, why
    for step, attempt, number, folder in from_rank_0(lambda: _newest_first(targets)):
        if unread and unread[:2] != (step, attempt):
            break
        target = targets[number]
        found, fault, readable = _try(target, folder, fragments, expected)
        faults = [each for each in gather((fault, readable)) if each[0]]
        if not faults:
            assert found is not None
            return found, [_note(text, bad_step, found.step, target) for bad_step, text in bad]
        damage = next((fault for fault, readable in faults if readable), "")
        if damage:
            bad.append((step, f"checkpoint {target.url}/{folder} is set aside: {damage}"))
            from_rank_0(lambda at=target, name=folder, why=damage: set_aside(at, name, why))  # type: ignore[misc]
        else:
            unread = (step, attempt, faults[0][0])
    if unread:
        raise StoreError(unread[2])
    return None, [f"{text}; no other one is left" for _, text in bad]


def assemble(targets: Sequence[Store], step: int | None = None) -> tuple[RunState, dict[str, torch.Tensor], list[str]]:
    """The newest checkpoint's fp32 master weights, verified, whole, outside any process group (for export).

    Args:
        targets: where checkpoints are, the preferred one first.
        step: take those after so many steps only.

    Returns:
        Its state; parameter name -> weight; one line for each newer checkpoint that is damaged.

    Raises:
        UserError: there is no checkpoint, none is good, or one cannot be read.
    """
    faults: list[str] = []
    for found_step, _, number, folder in _newest_first(targets):
        if step not in (None, found_step):
            continue
        target = targets[number]
        try:
            manifest = read_manifest(target, folder)
        except (TornCheckpoint, StoreMissing) as error:
            faults.append(f"checkpoint {target.url}/{folder} is damaged: {error}")
            continue
        weights = {name: torch.empty(shape) for name, shape in manifest.state.shapes.items()}
        whole = [
            Fragment(name=name, start=0, numel=weight.numel(), views={"master": weight.view(-1)})
            for name, weight in weights.items()
        ]
        if found := fill(target, folder, manifest, whole, manifest.files):
            faults.append(f"checkpoint {target.url}/{folder} is damaged: {found[0]}")
        else:
            return manifest.state, weights, faults
    where = " and ".join(target.url for target in targets)
    missing = "there is none yet" if step is None else f"there is none of step {step:,}"
    what = f"none is good ({'; '.join(faults)})" if faults else missing
    raise UserError(f"{where}: no checkpoint to read: {what}; train on, or name another run")


def check_belongs(found: RunState, expected: RunState) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        TornCheckpoint: names what differs.
    """
    for field, what in (
        ("identity_sha256", "another config (model, objective, optimizer, seed, steps, batch)"),
        ("corpus_fingerprint", "another corpus"),
        ("shapes", "other parameter shapes"),
        ("shared", "other shared parameters"),
    ):
        if getattr(found, field) != getattr(expected, field):
            raise TornCheckpoint(f"it belongs to a run of {what}")
    if found.skipped != tuple(step for step in expected.skipped if step < found.step):
        raise TornCheckpoint("it skips other steps than the run does now")


def _newest_first(targets: Sequence[Store]) -> list[tuple[int, int, int, str]]:
    """(step, attempt, number of the target, folder): by step and attempt, then in the order of the targets."""
    found = [
        (step, attempt, number, folder)
        for number, target in enumerate(targets)
        for step, attempt, folder in committed(target)
    ]
    return sorted(found, key=lambda place: (-place[0], -place[1], place[2]))


def _try(
    target: Store, folder: str, fragments: Sequence[Fragment], expected: RunState
) -> tuple[RunState | None, str, bool]:
    """(state, what is wrong with what this rank read, whether it could be read)."""
    try:
        manifest = read_manifest(target, folder)
        check_belongs(manifest.state, expected)
        share = manifest.files[dist.get_rank() :: dist.get_world_size()]
        faults = fill(target, folder, manifest, fragments, share)
    except (TornCheckpoint, StoreMissing) as error:
        return None, str(error), True
    except StoreError as error:
        return None, str(error), False
    return manifest.state, faults[0] if faults else "", True


def _note(text: str, bad_step: int, used_step: int, used: Store) -> str:
    if bad_step == used_step:
        return f"{text}; the same step is good in {used.url}"
    return f"{text}; step {used_step:,} is used instead, {bad_step - used_step:,} steps are done again"
