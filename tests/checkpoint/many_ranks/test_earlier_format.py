"""Check that checkpoints of manifest format 2, as earlier versions wrote them, are loaded, listed and copied.

The checkpoint is written by the safetensors library and plain JSON, not by this package, so a change of the package's
writer cannot hide a change of the format.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import checkpoints as small

from electra_dist.checkpoint.checkpoint_manifest import read_manifest
from electra_dist.checkpoint.commit import begin_attempt, leftovers
from electra_dist.checkpoint.file_reader import verify
from electra_dist.checkpoint.repair import copy_to_all
from electra_dist.checkpoint.restore_state import load_newest
from electra_dist.store.interface import Store
from electra_dist.store.local_store import LocalStore

STEP, RANKS, FOLDER = 10, 3, "step-00000010-a0001"
RUN = {"corpus_fingerprint": "corpus", "identity_sha256": "0" * 64}


def canonical(tree: dict[str, Any]) -> bytes:
    """Return a tree as JSON in UTF-8 with sorted keys and without spaces, as the digests of a manifest need it."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def write_file(folder: Path, rank: int) -> dict[str, Any]:
    """Write the safetensors file of a rank at ZeRO stage 1, and return its entry in the manifest.

    Args:
        folder: folder of the checkpoint.
        rank: number of the rank; the file has its share of `small.content`.
    """
    path = folder / f"rank-{rank:05d}.safetensors"
    arrays = {}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for part in small.share(small.content(STEP), rank, RANKS):
            arrays[f"{kind}|{part.name}|{part.start}"] = part.views[kind].numpy()
    save_file(arrays, path)
    data = path.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    tensors = []
    for name, described in json.loads(data[8:header_bytes]).items():
        kind, parameter, start = name.split("|")
        begin, end = described["data_offsets"]
        content = data[header_bytes + begin : header_bytes + end]
        tensors.append(
            {
                "kind": kind,
                "name": parameter,
                "start": int(start),
                "numel": len(np.frombuffer(content, np.float32)),
                "offset": header_bytes + begin,
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )
    return {
        "name": path.name,
        "size_bytes": len(data),
        "header_bytes": header_bytes,
        "header_sha256": hashlib.sha256(data[:header_bytes]).hexdigest(),
        "tensors": sorted(tensors, key=lambda tensor: tensor["offset"]),
    }


@pytest.fixture
def target(tmp_path: Path) -> LocalStore:
    """A store with one committed checkpoint of three ranks.

    The entry of rank 1, which should have been deleted after the commit, is still there.
    """
    folder = tmp_path / "target" / FOLDER
    folder.mkdir(parents=True)
    state = {
        "step": STEP,
        "attempt": 1,
        **RUN,
        "world_size": RANKS,
        "zero_stage": 1,
        "shapes": small.SHAPES,
        "shared": {"tied.weight": "word.weight"},
        "versions": {"torch": "2.8.0"},
        "bit_settings": {},
        "rows_seen": 160,
        "rows_digest": 2**63,
        "skipped": [],
        "recent_losses": [1.5],
        "eval_rtd_loss": None,
        "eval_context_auc": None,
        "eval_loss": None,
        "loss_scale": None,
        "overflowed": [],
    }
    files = [write_file(folder, rank) for rank in range(RANKS)]
    tree = {"format": 2, "saved_at": "2026-01-01T00:00:00+00:00", "state": state, "files": files}
    digest = hashlib.sha256(canonical(tree)).hexdigest()
    (folder / "manifest.json").write_bytes(canonical({**tree, "sha256": digest}) + b"\n")
    entry = canonical(files[1])
    (folder / "rank-00001.json").write_bytes(hashlib.sha256(entry).hexdigest().encode() + b"\n" + entry)
    attempts = tmp_path / "target" / "attempts"
    attempts.mkdir()
    (attempts / "0001.json").write_bytes(canonical(RUN) + b"\n")
    return LocalStore(tmp_path / "target")


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_the_earlier_format_is_loaded_and_copied_bit_for_bit(
    target: LocalStore, tmp_path: Path
) -> None:
    manifest, faults = verify(target, FOLDER)
    assert manifest is not None
    assert faults == []
    assert manifest.dump() == target.read(f"{FOLDER}/manifest.json")
    values = small.empty()
    found, notes = load_newest([target], small.share(values, 0, 1), small.state_at(0))
    assert found == manifest.state
    assert notes == []
    assert small.equal(values, small.content(STEP))
    other = LocalStore(tmp_path / "other")
    targets: list[Store] = [target, other]
    copy_to_all(targets, FOLDER)
    for file in (*(file.name for file in manifest.files), "manifest.json"):
        assert other.read(f"{FOLDER}/{file}") == target.read(f"{FOLDER}/{file}")


def test_the_next_start_counts_on_and_deletes_only_the_entry(target: LocalStore) -> None:
    before = target.list()
    assert leftovers(target, 1) == [f"{FOLDER}/rank-00001.json"]
    assert begin_attempt([target], RUN) == 2
    assert target.list() == sorted({*before, "attempts/0002.json"} - {f"{FOLDER}/rank-00001.json"})
    assert read_manifest(target, FOLDER).state.step == STEP
