"""Resolve the argument PATH of the `electra-dist checkpoint` commands to stores and checkpoint folders.

A store is a folder, local or below an s3:// prefix, that holds the checkpoints of a run, each in a folder of its own.
"""

from __future__ import annotations

from pathlib import Path

from electra_dist.checkpoint.checkpoint import Checkpoint, Owner, checkpoints, open_targets, owner_of, parse_folder
from electra_dist.errors import UserError
from electra_dist.run.folder import is_run_folder, open_run, read_identity
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


def find_targets(path: str, endpoint_url: str | None = None) -> list[Store]:
    """Return the stores in which `path` has checkpoints: all targets of the run for a run folder, otherwise `path`.

    `endpoint_url` is the S3 endpoint of an s3:// path (None: AWS). For a run folder, the run's config names it.
    """
    if path.startswith("s3://"):
        return [open_store(path, endpoint_url)]
    folder = Path(path)
    if is_run_folder(folder):
        return open_targets(open_run(folder))
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; give a run folder, a folder of checkpoints or an s3:// prefix")
    return [open_store(path)]


def find_owner(path: str) -> Owner | None:
    """Return the run that must have written the checkpoints of a run folder; None if `path` tells no run."""
    if path.startswith("s3://") or not is_run_folder(Path(path)):
        return None
    return owner_of(open_run(Path(path)), read_identity(Path(path)))


def find_checkpoint(path: str, endpoint_url: str | None = None) -> Checkpoint:
    """Return the checkpoint `path` itself, or the newest complete one below `path`.

    A checkpoint is complete if it has a manifest; whether the folder `path` itself has a manifest is not checked. If
    several stores hold the newest checkpoint, the first of these stores is taken.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    step_and_attempt = parse_folder(name)
    if step_and_attempt is not None:
        return Checkpoint(*step_and_attempt, open_store(parent or ".", endpoint_url))
    found = checkpoints(find_targets(path, endpoint_url))
    if not found:
        raise UserError(
            f"{path}: no committed checkpoint; run `electra-dist checkpoint list {path}` to see what there is"
        )
    return found[0]
