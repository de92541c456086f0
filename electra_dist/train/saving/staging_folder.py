"""Choose the staging folder, where a node keeps checkpoint files on their way to S3, and delete abandoned ones.

Guarantee: a run on several nodes writes these files into the node's cache folder (`train/node_cache.py`), and not into
the run folder that all nodes share. Each run has a staging folder of its own on each node, with a file that names the
process using it. At the start of a run, one rank of each node deletes the staging folders of this node whose process
has ended. A folder stays if its process cannot be seen, because it runs in another container.

Limits: if a run never uses a node again, its staging folder there remains until the next run of the same user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from electra_dist.config import Config
from electra_dist.engine.rank_environment import rank_place
from electra_dist.run.folder import STAGING_DIR
from electra_dist.run.processes import ProcessIdentity, is_of_this_machine, is_running, node_name, this_process
from electra_dist.store.atomic_files import replacing
from electra_dist.store.interface import Store
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.patience import Patience
from electra_dist.store.regular_files import read_regular
from electra_dist.train.node_cache import is_first_on_node, node_cache_folder

_OWNER_FILE = "owner.json"  # in a staging folder: the process that uses it
_NAME_CHARACTERS = 16  # of the digest of the run folder's path, which is part of the name of a staging folder
_OWNER = TypeAdapter(ProcessIdentity)


def prepare_staging(config: Config, targets: Sequence[Store], patience: Patience) -> Path:
    """Choose the folder where checkpoint files are written before their upload to S3, and record that it is in use.

    Every rank calls this once, at the start of the run. If the run is on several nodes and all checkpoint stores are
    on S3, the folder is in the node's cache folder; otherwise it is in the run folder.
    """
    run_dir = Path(config.run_dir)
    all_targets_on_s3 = all(target.local_path(STAGING_DIR) is None for target in targets)
    if not all_targets_on_s3 or not rank_place().has_several_nodes:
        return run_dir / STAGING_DIR
    folder = staging_folder(run_dir, node_cache_folder(config).path)
    if is_first_on_node():
        patience.call(lambda: take_over(folder))
    return folder


def staging_folder(run_dir: Path, node_folder: Path) -> Path:
    """Return the path of the staging folder that a run on several nodes uses on this node; nothing is created.

    The folder's name has the node's name and a digest of the run folder's path, because several nodes and runs may
    share `node_folder`.
    """
    digest = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:_NAME_CHARACTERS]
    return node_folder / STAGING_DIR / f"{node_name()}-{digest}"


def take_over(folder: Path) -> None:
    """Record this process as the user of a staging folder, and delete this node's abandoned staging folders.

    One rank of each node calls this. The checkpoint writer deletes the files that an earlier start has left in
    `folder`.
    """
    for other_folder in list(folder.parent.glob("*")):
        node_of_folder, _, _ = other_folder.name.rpartition("-")  # NODE-DIGEST; NODE may contain hyphens
        is_of_this_node = node_of_folder == node_name()
        if is_of_this_node and other_folder != folder and _is_abandoned(other_folder):
            shutil.rmtree(other_folder, ignore_errors=True)
    with replacing(folder / _OWNER_FILE) as out:
        out.write(json.dumps(dataclasses.asdict(this_process())).encode() + b"\n")


def _is_abandoned(folder: Path) -> bool:
    """Return whether the process that used a staging folder has ended; False if this is not certain."""
    with contextlib.suppress(OSError, DamagedJson):
        owner = validate_json(_OWNER, parse_json_object(read_regular(folder / _OWNER_FILE)))
        # The folder belongs to this node. A process that was started before the node's last boot cannot run any more.
        return is_running(owner) is False or not is_of_this_machine(owner)
    return False  # no readable record of a process
