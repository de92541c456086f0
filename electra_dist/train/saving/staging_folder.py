"""Choose the folder in which a node keeps checkpoint files on their way to S3, and clear what dead runs left there.

Guarantee: a run on several nodes writes these files to a disk of the node, and not through the run folder that all
nodes share. Each run has a folder of its own on each node, which names the process that uses it. One rank of each node
deletes the folders of this node whose process has ended; a folder whose process cannot be seen, because it runs in
another container, is left alone.

Limits: what a run leaves on a node that it never uses again is deleted by the next run of the same user there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from electra_dist.config import Config
from electra_dist.run.folder import STAGING_DIR
from electra_dist.run.node_strikes import node_name
from electra_dist.run.process_identity import ProcessIdentity, is_of_this_machine, is_running, this_process
from electra_dist.store.atomic_files import replacing
from electra_dist.store.interface import Store
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.patience import Patience
from electra_dist.train.node_cache import has_several_nodes, is_first_on_node, node_cache_folder

_OWNER_FILE = "owner.json"
_NAME_CHARACTERS = 16  # of the digest of the run folder, which names a run's folder
_OWNER = TypeAdapter(ProcessIdentity)


def prepare_staging(config: Config, targets: Sequence[Store], patience: Patience) -> Path:
    """Return the folder for files on their way to S3; the first rank of a node makes it this run's.

    With a single node it is in the run folder. With a target that is a local folder it is not used, and nothing is
    done.

    Args:
        config: the resolved config of the run.
        targets: the stores that receive every checkpoint.
        patience: how long a disk that is full or away is waited for.

    Raises:
        StorageLost: the disk stayed full or away for longer than that.
        StoreError: this node has no temporary directory that can be used.
    """
    run_dir = Path(config.run_dir)
    is_used = all(target.local_path(STAGING_DIR) is None for target in targets)
    if not is_used or not has_several_nodes():
        return run_dir / STAGING_DIR
    folder = staging_folder(run_dir, node_cache_folder(config).path)
    if is_first_on_node():
        patience.call(lambda: take_over(folder))
    return folder


def staging_folder(run_dir: Path, node_folder: Path) -> Path:
    """Return the folder of a run on several nodes for checkpoint files on their way to S3; nothing is created.

    Args:
        run_dir: the run folder, by which the folder is named.
        node_folder: the folder of this node's cache.
    """
    digest = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:_NAME_CHARACTERS]
    return node_folder / STAGING_DIR / f"{_node_prefix()}{digest}"


def _node_prefix() -> str:
    """Return what the names of this node's folders begin with; `data.cache_dir` may be a folder that nodes share."""
    return f"{node_name()}-"


def take_over(folder: Path) -> None:
    """Write this process into a run's folder as the one that uses it, and delete folders whose process has ended.

    One rank of each node calls it, at the start of the run, for a folder that is not in the run folder. Files that an
    earlier start of the run has left in its folder are deleted by the checkpoint writer.

    Args:
        folder: the result of `staging_folder`.

    Raises:
        StoreAway: the disk is full, read-only or does not respond.
    """
    of_this_node = [path for path in folder.parent.glob("*") if path.name.startswith(_node_prefix())]
    for other in of_this_node:
        if other != folder and _is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)
    with replacing(folder / _OWNER_FILE) as out:
        out.write(json.dumps(dataclasses.asdict(this_process())).encode() + b"\n")


def _is_abandoned(folder: Path) -> bool:
    """Return whether the process that uses a folder has certainly ended; False for a folder that names none."""
    with contextlib.suppress(OSError, DamagedJson):
        owner = validate_json(_OWNER, parse_json_object((folder / _OWNER_FILE).read_bytes()))
        # The name of the folder has that of this node, so a process of another boot has ended with that boot.
        return is_running(owner) is False or not is_of_this_machine(owner)
    return False
