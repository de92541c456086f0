"""List, compare and repair checkpoints from outside a run, for the commands of `electra-dist checkpoint`.

Guarantee: a checkpoint counts as good only after every byte of it was verified; a restored one is verified again. Data
are copied only from a good copy of the same checkpoint in another store: the same step and start of the same run, and
the same manifest, if the damaged checkpoint's can still be read. Before anything is changed, a checkpoint of another
run, in a target or in a donor, is refused. What a run itself has given up (it was begun again from scratch, or a
rollback has discarded the checkpoint) is not restored. A checkpoint that cannot be restored is set aside (its manifest
is renamed, so that no load takes it), not deleted. Unfinished files are deleted, except those of the newest start of
the run, which may still be running.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from electra_dist.checkpoint.commit import leftovers, newest_attempt, run_of_attempt, sweep
from electra_dist.checkpoint.manifest import KINDS, MANIFEST, Fragment, Kind, Manifest, RunState
from electra_dist.checkpoint.reader import CheckpointReader, verify
from electra_dist.checkpoint.stored_copies import (
    SET_ASIDE,
    SET_ASIDE_REASON,
    WITHDRAWN,
    Checkpoint,
    OtherRun,
    Owner,
    parse_folder,
)
from electra_dist.errors import StoreError, StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store

Status = Literal["committed", "damaged", "of another run", "set aside", "leftover"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Checkpoint folder found in a store, with its status; its tensor files were not read and may be damaged."""

    checkpoint: Checkpoint
    status: Status  # "committed": the manifest is good; "damaged": it is not; "leftover": there is no manifest
    manifest: Manifest | None = None  # only if the status is "committed" or "of another run"
    note: str = ""  # what is wrong with it, or why it was set aside


def survey(target: Store, owner: Owner | None = None) -> list[Found]:
    """List every checkpoint folder of a store with its status, oldest first, without reading tensor files.
    It costs one listing, and one request for each checkpoint that is committed or set aside. If `owner` is None,
    checkpoints of other runs are not recognized as such.
    """
    names_of_checkpoints: dict[tuple[int, int], set[str]] = {}
    for key in target.list("step-"):
        folder, _, name = key.partition("/")  # step-00000400-a0003/manifest.json
        step_and_attempt = parse_folder(folder)
        if step_and_attempt is not None:
            names_of_checkpoints.setdefault(step_and_attempt, set()).add(name)
    return [
        _inspect(Checkpoint(step, attempt, target), names, owner)
        for (step, attempt), names in sorted(names_of_checkpoints.items())
    ]


def _inspect(checkpoint: Checkpoint, names: set[str], owner: Owner | None) -> Found:
    """Determine the status of a checkpoint folder from the names of its files and from its manifest."""
    if MANIFEST in names:
        try:
            manifest = checkpoint.manifest()
        except (TornCheckpoint, StoreMissing) as error:
            return Found(checkpoint=checkpoint, status="damaged", note=str(error))
        note = owner.fault(manifest.state) if owner is not None else ""
        status: Status = "of another run" if note else "committed"
        return Found(checkpoint=checkpoint, status=status, manifest=manifest, note=note)
    if SET_ASIDE in names:
        note = checkpoint.store.read(checkpoint.key(SET_ASIDE_REASON)).decode(errors="replace").strip()
        return Found(checkpoint=checkpoint, status="set aside", note=note)
    return Found(checkpoint=checkpoint, status="leftover")


def repair(
    targets: Sequence[Store],
    donors: Sequence[Store],
    *,
    dry_run: bool,
    advance: Callable[[int], None] = lambda num_bytes: None,
    owner: Owner | None = None,
) -> Iterator[str]:
    """Repair the checkpoints in the stores `targets` while the caller iterates; yield one line for each change.
    A damaged checkpoint is restored from a good copy in another target or in a donor, a store that is only read. If
    there is no good copy, its manifest is renamed (set aside), so that no load takes it. Then files that no checkpoint
    needs are deleted. With `dry_run`, the lines say what would be done.

    `advance` gets, from several threads, the bytes verified since its last call. `owner` is the run that wrote the
    checkpoints; None stands for the one that attempts/*.json of each target names. Raises OtherRun before any change
    if a checkpoint is of another run.
    """
    surveys = [survey(target) for target in targets]
    for found in itertools.chain(*surveys):
        owner_of_found = owner or _owner_of(found)
        if owner_of_found is not None:
            _check_owner(found, owner_of_found, donors)
    for target, checkpoints in zip(targets, surveys):
        other_stores = [store for store in (*targets, *donors) if store.url != target.url]
        for found in checkpoints:
            yield from _repair_checkpoint(found, other_stores, dry_run, advance, owner or _owner_of(found))
        newest = newest_attempt(target)
        removed_keys = leftovers(target, newest) if dry_run else sweep(target, newest)
        for key in removed_keys:
            yield f"{target.url}/{key}: leftover of an unfinished save, removed"


def _owner_of(found: Found) -> Owner | None:
    """Return the run that wrote a checkpoint, from attempts/*.json or else its manifest; None if both are missing."""
    run = run_of_attempt(found.checkpoint.store, found.checkpoint.attempt)
    manifest = _own_manifest(found)
    if run is None and manifest is not None:
        state = manifest.state
        run = {"identity_sha256": state.identity_sha256, "corpus_fingerprint": state.corpus_fingerprint}
    if run is None:
        return None
    return Owner(frozenset([run["identity_sha256"]]), frozenset([run["corpus_fingerprint"]]))


def _own_manifest(found: Found) -> Manifest | None:
    """Return the manifest of a checkpoint, also if it was set aside; None if it is damaged or missing."""
    if found.status == "set aside":
        with contextlib.suppress(TornCheckpoint):
            return Manifest.parse(found.checkpoint.store.read(found.checkpoint.key(SET_ASIDE)))
    return found.manifest


def _manifest_in(store: Store, checkpoint: Checkpoint) -> Manifest | None:
    """Return the manifest of this checkpoint's copy in another store; None if it is damaged or missing."""
    with contextlib.suppress(TornCheckpoint, StoreMissing):
        return replace(checkpoint, store=store).manifest()
    return None


def _check_owner(found: Found, owner: Owner, donors: Sequence[Store]) -> None:
    """Raise OtherRun if another run than `owner` wrote a checkpoint or its supposed copy in one of `donors`."""
    checkpoint = found.checkpoint
    if found.manifest is not None:
        owner.check(found.manifest.state, checkpoint.store.url)
    for donor in donors:
        manifest = _manifest_in(donor, checkpoint)
        fault = owner.fault(manifest.state) if manifest is not None else ""
        if fault:
            raise OtherRun(
                f"{donor.url}/{checkpoint.folder} is no copy of {checkpoint.url}, because {fault}; nothing was "
                f"changed; give a place with copies of this run's checkpoints"
            )


def copy_to_all(targets: Sequence[Store], step: int, attempt: int) -> None:
    """Copy a checkpoint to each store that lacks it, for example after a kill between two commits.
    At least one store must have the checkpoint, verified by the caller. The manifest is copied last.
    """
    copies = [Checkpoint(step, attempt, target) for target in targets]
    is_there = [copy.store.exists(copy.key(MANIFEST)) for copy in copies]
    donor = copies[is_there.index(True)]
    manifest = donor.manifest()
    for copy, is_complete in zip(copies, is_there):
        if is_complete:
            continue
        reader = CheckpointReader(copy, manifest)
        for file in manifest.files:
            _copy(donor.store, copy.store, copy.key(file.name))
            faults = reader.faults(file)
            if faults:
                raise StoreError(f"{copy.url}: copied from {donor.store.url} and damaged: {faults[0]}")
        copy.store.write_new(copy.key(MANIFEST), manifest.dump())


def _repair_checkpoint(
    found: Found,
    other_stores: Sequence[Store],
    dry_run: bool,
    advance: Callable[[int], None],
    owner: Owner | None,
) -> Iterator[str]:
    """Verify a checkpoint and, if it is damaged, restore it from a good copy; if there is none, set it aside.
    Yields a line for the log for each change.
    """
    if found.status == "leftover" or found.note.startswith(WITHDRAWN):
        return
    checkpoint = found.checkpoint
    is_set_aside = found.status == "set aside"
    faults = [found.note] if is_set_aside else verify(checkpoint, advance)[1]
    if not faults:
        return
    for store in other_stores:
        copy = replace(checkpoint, store=store)
        if _is_copy(copy, found, owner) and not verify(copy, advance)[1]:
            yield from _restore(found, copy, faults, dry_run)
            return
    if is_set_aside:
        return  # there is nothing more to do without a good copy
    yield (
        f"{checkpoint.url}: set aside, no other target has a good copy ({faults[0]}); if a copy exists elsewhere, run "
        f"the repair with --from URL"
    )
    if not dry_run:
        checkpoint.set_aside(faults[0])


def _is_copy(copy: Checkpoint, found: Found, owner: Owner | None) -> bool:
    """Return whether `copy`, of the same name, is a copy of `found`: it has the same manifest.
    A save writes the same files, digests and time to all targets, so the manifests of copies are equal. If the
    manifest of `found` is lost, it is enough that the run `owner` wrote the copy.
    """
    manifest = _manifest_in(copy.store, copy)
    if manifest is None:
        return False
    own_manifest = _own_manifest(found)
    if own_manifest is not None:
        return manifest == own_manifest
    return owner is not None and not owner.fault(manifest.state)


def _restore(found: Found, donor: Checkpoint, faults: Sequence[str], dry_run: bool) -> Iterator[str]:
    """Copy the damaged files from `donor`, then the manifest, so that the checkpoint counts only when all are good."""
    checkpoint = found.checkpoint
    manifest = donor.manifest()
    yield f"{checkpoint.url} is damaged: {'; '.join(faults)}"
    reader = CheckpointReader(checkpoint, manifest)
    for file in manifest.files:
        if reader.faults(file):
            yield f"{checkpoint.url}/{file.name}: restored from {donor.store.url}"
            if not dry_run:
                _copy(donor.store, checkpoint.store, checkpoint.key(file.name))
    if found.status != "committed":
        yield f"{checkpoint.url}/{MANIFEST}: restored from {donor.store.url}"
        if not dry_run:
            checkpoint.store.write(checkpoint.key(MANIFEST), manifest.dump())
            checkpoint.store.delete(checkpoint.key(SET_ASIDE))
            checkpoint.store.delete(checkpoint.key(SET_ASIDE_REASON))
    if dry_run:
        return
    _, remaining_faults = verify(checkpoint)
    if remaining_faults:
        raise StoreError(
            f"{checkpoint.url}: still damaged after it was restored: {remaining_faults[0]}; "
            f"check the disk or the storage service, then run the repair again"
        )


def _copy(source: Store, destination: Store, key: str) -> None:
    path = source.local_path(key)
    if path is not None:
        destination.upload(path, key)
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "file"
        source.fetch(key, path)
        destination.upload(path, key)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between one parameter, with its optimizer moments, in two checkpoints."""

    name: str  # of the parameter
    largest: dict[Kind, float]  # kind (weights or a moment) -> largest absolute difference; NaN if either has a NaN
    equal: bool  # bit for bit, weights and both moments


def state_differences(a: RunState, b: RunState) -> list[tuple[str, Any, Any]]:
    """Return (field, value in `a`, value in `b`) for every field in which the states of two checkpoints differ.
    World size, ZeRO stage and package versions are among them; they may differ although all weights are equal.
    """
    return [
        (field, getattr(a, field), getattr(b, field))
        for field in RunState.model_fields
        if getattr(a, field) != getattr(b, field)
    ]


def parameter_differences(a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference]:
    """Compare every parameter that both checkpoints have in the same shape, in the order of `a`, one at a time.
    Raises TornCheckpoint if a parameter of either side is damaged.
    """
    for name, shape in a.manifest.state.shapes.items():
        if b.manifest.state.shapes.get(name) != shape:
            continue
        left = _read(a, name)
        right = _read(b, name)
        largest = {kind: float((left[kind] - right[kind]).abs().max()) for kind in KINDS}
        # Bits are compared as integers: as floats a NaN would differ from itself, and -0 would equal 0.
        is_equal = all(torch.equal(left[kind].view(torch.int32), right[kind].view(torch.int32)) for kind in KINDS)
        yield Difference(name=name, largest=largest, equal=is_equal)


def _read(reader: CheckpointReader, name: str) -> dict[Kind, torch.Tensor]:
    """Read and verify a whole parameter and its moments, as flat fp32 CPU tensors."""
    numel = prod(reader.manifest.state.shapes[name])
    views = {kind: torch.empty(numel) for kind in KINDS}
    faults = reader.fill([Fragment(name=name, start=0, numel=numel, views=views)], check=())
    if faults:
        checkpoint = reader.checkpoint
        raise TornCheckpoint(
            f"{checkpoint.url} is damaged: {faults[0]}; run `electra-dist checkpoint repair "
            f"{shlex.quote(checkpoint.store.url)}`"
        )
    return views
