"""Check the staging folders, in which a node keeps checkpoint files until they are in S3: owners and deletion."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from support.counting_store import CountingStore, Service
from support.real_runs import tiny_tree

from electra_dist.config import Config
from electra_dist.run.processes import identity_of, this_process
from electra_dist.store.local_store import LocalStore
from electra_dist.store.patience import Patience
from electra_dist.train.saving import staging_folder as module
from electra_dist.train.saving.staging_folder import prepare_staging, staging_folder, take_over


def left_by(node_folder: Path, run: str, **owner: object) -> Path:
    """Create the staging folder of a run with one file, as an earlier process has left it, and return its path.

    Args:
        node_folder: folder of the node that holds the staging folders of all runs.
        run: name of the run.
        **owner: fields of the owner's process; the others are those of this process.
    """
    folder = staging_folder(Path("/runs") / run, node_folder)
    (folder / "step-00000010-a0001").mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps({**dataclasses.asdict(this_process()), **owner}))
    (folder / "step-00000010-a0001" / "rank-00000.safetensors").write_bytes(b"x")
    return folder


def test_folders_of_processes_that_have_ended_are_deleted_and_all_others_are_kept(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        ended = dataclasses.asdict(identity_of(process.pid))
        process.kill()
    dead = [left_by(tmp_path, "killed", **ended), left_by(tmp_path, "before the reboot", boot_id="another boot")]
    own = left_by(tmp_path, "own", **ended)
    living = left_by(tmp_path, "living")
    in_container = left_by(tmp_path, "in a container", pid_namespace="pid:[1]")
    unknown = left_by(tmp_path, "unknown")
    (unknown / "owner.json").write_text("{")
    take_over(own)
    assert [folder.exists() for folder in dead] == [False, False]
    assert all(folder.exists() for folder in (own, living, in_container, unknown))
    # What an earlier start of the run has left is deleted by its checkpoint writer, which knows the starts.
    assert (own / "step-00000010-a0001").exists()
    assert json.loads((own / "owner.json").read_text()) == dataclasses.asdict(this_process())


@pytest.mark.parametrize(
    ("world_size", "is_remote", "is_in_run"), [("2", True, True), ("4", True, False), ("4", False, True)]
)
def test_a_run_on_several_nodes_stages_on_the_nodes_own_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: str, is_remote: bool, is_in_run: bool
) -> None:
    launched = {"WORLD_SIZE": world_size, "LOCAL_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    settings = {"data.cache_dir": str(tmp_path / "node")}
    config = Config.model_validate(tiny_tree(tmp_path / "run", "corpus", **settings))
    target = CountingStore(Service()) if is_remote else LocalStore(tmp_path / "target")
    folder = prepare_staging(config, [target], Patience(0.0))
    assert (folder == tmp_path / "run" / "staging") == is_in_run
    owners = list(tmp_path.rglob("owner.json"))
    assert owners == ([] if is_in_run else [folder / "owner.json"])
    assert is_in_run or folder.parent == tmp_path / "node" / "staging"


@pytest.mark.parametrize(("other_name", "own_name"), [("n1", "n2"), ("gpu-1", "gpu"), ("gpu", "gpu-1")])
def test_nodes_that_share_the_folder_leave_one_another_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_name: str, own_name: str
) -> None:
    monkeypatch.setattr(module, "node_name", lambda: other_name)
    other_node = left_by(tmp_path, "run", boot_id="of the other node")
    monkeypatch.setattr(module, "node_name", lambda: own_name)
    own = staging_folder(Path("/runs/run"), tmp_path)
    take_over(own)
    assert own != other_node
    assert other_node.exists()
