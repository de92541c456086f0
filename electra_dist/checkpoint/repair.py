"""Checkpoints from outside a run: what there is, and mending what is bad from another target.

Guarantee: a checkpoint is called good only after every byte of it was verified, the mended one again. A copy is taken
only from one that is good. What cannot be mended is set aside, not deleted. Nothing of the newest attempt, which may
be running, is taken for a leftover.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from electra_dist.checkpoint.commit import leftovers, newest_attempt, sweep
from electra_dist.checkpoint.manifest import (
    MANIFEST,
    SET_ASIDE,
    SET_ASIDE_REASON,
    Manifest,
    parse_folder,
    read_manifest,
    set_aside,
)
from electra_dist.checkpoint.read import verify, verify_file
from electra_dist.errors import StoreError, StoreMissing, TornCheckpoint
from electra_dist.store.interface import Store

Status = Literal["committed", "damaged", "set aside", "leftover"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint's folder in a target; its files were not looked at."""

    target: Store
    folder: str
    step: int
    attempt: int
    status: Status
    manifest: Manifest | None = None
    note: str = ""  # what is wrong with its manifest, or why it was set aside

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{self.target.url}/{self.folder}"


def survey(target: Store) -> list[Found]:
    """Every checkpoint's folder, oldest first. Costs a request for each."""
    names: dict[str, set[str]] = {}
    for key in target.list("step-"):
        folder, _, name = key.partition("/")
        names.setdefault(folder, set()).add(name)
    places = sorted((*place, folder) for folder in names if (place := parse_folder(folder)))
    return [_look(target, folder, step, attempt, names[folder]) for step, attempt, folder in places]


def _look(target: Store, folder: str, step: int, attempt: int, names: set[str]) -> Found:
    status: Status = "leftover"
    manifest, note = None, ""
    if MANIFEST in names:
        try:
            manifest, status = read_manifest(target, folder), "committed"
        except (TornCheckpoint, StoreMissing) as error:
            note, status = str(error), "damaged"
    elif SET_ASIDE in names:
        status = "set aside"
        note = target.read(f"{folder}/{SET_ASIDE_REASON}").decode(errors="replace").strip()
    return Found(target=target, folder=folder, step=step, attempt=attempt, status=status, manifest=manifest, note=note)


def repair(
    targets: Sequence[Store],
    donors: Sequence[Store],
    *,
    dry_run: bool,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[str]:
    """Do it, and say each thing that was (or, in a dry run, would be) done.

    Args:
        donors: where good copies are looked for, beside the other targets.
    """
    for target in targets:
        others = [each for each in (*targets, *donors) if each.url != target.url]
        for found in survey(target):
            if found.status == "leftover":
                continue
            faults = [found.note] if found.status == "set aside" else verify(target, found.folder, advance)[1]
            if not faults:
                continue
            donor = next((each for each in others if _is_good(each, found.folder, advance)), None)
            if donor is not None:
                yield from _restore(found, donor, faults, dry_run)
            elif found.status != "set aside":
                yield f"{found.url}: set aside, no target has it good: {faults[0]}"
                if not dry_run:
                    set_aside(target, found.folder, faults[0])
        newest = newest_attempt(target)
        for key in leftovers(target, newest) if dry_run else sweep(target, newest):
            yield f"{target.url}/{key}: leftover, removed"


def _is_good(target: Store, folder: str, advance: Callable[[int], None]) -> bool:
    manifest, faults = verify(target, folder, advance)
    return manifest is not None and not faults


def _restore(found: Found, donor: Store, faults: Sequence[str], dry_run: bool) -> Iterator[str]:
    """Copy what differs; the manifest last, so that a set-aside checkpoint exists again only when it is whole."""
    target, folder = found.target, found.folder
    manifest = read_manifest(donor, folder)
    yield f"{found.url}: {'; '.join(faults)}"
    for file in manifest.files:
        if verify_file(target, folder, file):
            yield f"{found.url}/{file.name}: restored from {donor.url}"
            if not dry_run:
                _copy(donor, target, f"{folder}/{file.name}")
    if found.manifest != manifest:
        yield f"{found.url}/{MANIFEST}: restored from {donor.url}"
        if not dry_run:
            target.write(f"{folder}/{MANIFEST}", manifest.dump())
            target.delete(f"{folder}/{SET_ASIDE}")
            target.delete(f"{folder}/{SET_ASIDE_REASON}")
    if not dry_run and (remaining := verify(target, folder)[1]):
        raise StoreError(f"{found.url}: still bad after it was restored: {remaining[0]}; is its disk failing?")


def _copy(source: Store, destination: Store, key: str) -> None:
    path = source.local_path(key)
    if path is not None:
        destination.upload(path, key)
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "file"
        source.fetch(key, path, must_exist=True)
        destination.upload(path, key)
