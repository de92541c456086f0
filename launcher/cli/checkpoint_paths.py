"""What a user means by a path of checkpoints."""

from __future__ import annotations

from pathlib import Path

from electra_dist.checkpoint.manifest import committed, parse_folder
from electra_dist.checkpoint.targets import open_targets
from electra_dist.errors import UserError
from electra_dist.run.folder import is_run_folder, open_run
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store


def find_targets(path: str, endpoint_url: str | None = None) -> list[Store]:
    """What a user means by `path`: a run's folder (then its config says), a folder of checkpoints or an s3:// prefix.

    Raises:
        UserError: it is none of these.
    """
    if path.startswith("s3://"):
        return [open_store(path, endpoint_url)]
    folder = Path(path)
    if is_run_folder(folder):
        return open_targets(open_run(folder))
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; name a run's folder, a folder of checkpoints or an s3:// prefix")
    return [open_store(path)]


def find_checkpoint(path: str, endpoint_url: str | None = None) -> tuple[Store, str]:
    """(store, folder) of one checkpoint: `path` itself, or the newest committed below it.

    Raises:
        UserError: there is none.
    """
    above, _, name = path.rstrip("/").rpartition("/")
    if parse_folder(name):
        return open_store(above or ".", endpoint_url), name
    targets = find_targets(path, endpoint_url)
    found = [(step, attempt, -n, folder) for n, t in enumerate(targets) for step, attempt, folder in committed(t)]
    if not found:
        raise UserError(f"{path}: no committed checkpoint there; `electra-dist checkpoint list` shows what there is")
    *_, number, folder = max(found)
    return targets[-number], folder
