"""Names that file managers, editors, NFS and people leave in folders: every reader passes them over or names them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.judge import Ending, run_here
from fuzz.readers import TARGETS, Reader

from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store

FOLDERS = (
    *("run", "run/checkpoints", "run/checkpoints/attempts", "run/heartbeats", "run/meeting", "run/meeting/session"),
    *("run/slurm", "run/slurm/job-1-0", "corpus", "corpus/heldout", "indexed", "building", "building/progress"),
    *("building/progress/groups", "building/progress/buckets", "building/progress/parts"),
    *("export/discriminator", "seed-0", "."),
)
ANYWHERE = (
    ".DS_Store",
    ".nfs000000000012d6870000000b",
    "._metrics.jsonl",
    "notes.txt~",
    "#x#",
    ".x.swp",
    "Thumbs.db",
    "\udcff",
)
LIKE_OURS = {  # names that look like the project's own, in the folders where they would matter
    "run/checkpoints": (
        "step-x",
        "step-00000002-a0001 (copy)",
        "step-00000002-a0001.bak",
        "step-99999999999999999999-a0001",
    ),
    "run/checkpoints/attempts": ("0001 (copy).json", "x.json", "0001.json.bak", "٣.json", "00.json"),
    "run/heartbeats": ("rank-x.json", "rank-00000 (copy).json", "rank-00009.json"),
    "run/meeting/session": ("node-x.json", "node-1.json.bak", "node-1 (copy).json", "node-01.json", "node-٣.json"),
    "run/slurm": ("submission-0002 (copy).sh", "submission-x.yaml", "submission-0009.sh.bak"),
    "run/slurm/job-1-0": ("exit-", "exit-n0.bak"),
    "building/progress/groups": ("000001 (copy).json", "x.json"),
    "building/progress/buckets": ("000001 (copy).json", "x.heldout.npy"),
}
CONTENTS = (None, b"", b"\xff\0{")  # None makes a folder
READERS = sorted({reader for target in TARGETS for reader in target.readers}, key=lambda reader: reader.name)


@pytest.fixture
def copy(specimen: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the folder, at the same path as before, because the files name it."""
    kept = tmp_path / "kept"
    shutil.copytree(specimen, kept, symlinks=True)
    yield specimen
    shutil.rmtree(specimen)
    shutil.copytree(kept, specimen, symlinks=True)


@pytest.fixture(scope="module")
def good(specimen: Path) -> dict[Reader, Ending]:
    """How each reader ends without foreign names."""
    return {reader: run_here(reader, specimen) for reader in READERS}


@pytest.mark.multiproc
@pytest.mark.parametrize("content", CONTENTS, ids=("folder", "empty", "bytes"))
@pytest.mark.sample
def test_foreign_names_in_every_folder_end_no_reader(
    copy: Path, good: dict[Reader, Ending], content: bytes | None
) -> None:
    for folder in FOLDERS:
        for name in (*ANYWHERE, *LIKE_OURS.get(folder, ())):
            path = copy / folder / name
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
    for reader in READERS:
        ending = run_here(reader, copy)
        assert not ending.is_fault, (reader.name, ending.text)
        assert ending.outcome in (good[reader].outcome, "refused"), (reader.name, ending)


@pytest.mark.multiproc
def test_a_start_takes_the_next_number_among_foreign_names(copy: Path) -> None:
    attempts = copy / "run" / "checkpoints" / "attempts"
    document = (attempts / "0001.json").read_bytes()
    for name in (*ANYWHERE, *LIKE_OURS["run/checkpoints/attempts"]):
        (attempts / name).write_bytes(b"")
    store = open_store(str(attempts.parent))
    with pytest.raises(UserError, match="another run"):
        begin_attempt([store], {"identity_sha256": "of another run"})
    assert (attempts / "0001.json").read_bytes() == document
