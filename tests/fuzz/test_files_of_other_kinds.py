"""A named pipe, an endless device, a folder, a loop of links or a huge file in place of any file ends its reader."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fuzz import judge
from fuzz.judge import MORE_BYTES, run_here
from fuzz.readers import TARGETS, Reader, Target

pytestmark = [pytest.mark.multiproc, pytest.mark.sample]


def huge(path: Path) -> None:
    """Make a file of a tebibyte that takes no space on the disk."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "huge": huge,
}
# Read in parts, or mapped: what such a file holds is found wrong in its first part, or only after all of it.
STREAMED = ("metrics.jsonl", "samples.jsonl", "ledger.jsonl", "jobs.jsonl", ".tar", ".safetensors", "spills", ".zst")
# Functions of the table that read or copy the file in ways of their own, or ask for a file that is there.
OWN_WAYS = ("merge of parts", "metrics at a resume", "manifest", "corpus prepare", "lease")
CASES = [
    (target, reader, kind)
    for target in TARGETS
    for reader in target.readers
    for kind in KINDS
    if reader.name not in OWN_WAYS
    if kind != "huge" or not any(name in target.file for name in STREAMED)
]


@pytest.fixture
def replaced(specimen: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Target, str], None]]:
    """`replaced(target, kind)`: another kind of file is in the place of a good one until the end of the test."""
    monkeypatch.setattr(judge, "LONGEST_SECONDS", 10.0)
    kept: list[tuple[Path, Path]] = []

    def put(target: Target, kind: str) -> None:
        path = target.path(specimen)
        good = specimen.parent / "good"
        path.rename(good)
        kept.append((path, good))
        KINDS[kind](path)

    yield put
    for path, good in kept:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        good.rename(path)


@pytest.mark.parametrize(
    ("target", "reader", "kind"), CASES, ids=[f"{t.file}-{r.name}-{k}".replace(" ", "_") for t, r, k in CASES]
)
def test_another_kind_of_file_ends_its_reader_in_one_line(
    target: Target, reader: Reader, kind: str, specimen: Path, replaced: Callable[[Target, str], None]
) -> None:
    replaced(target, kind)
    ending = run_here(reader, specimen)
    assert not ending.is_fault, ending.text
    assert ending.peak_bytes < 2 * MORE_BYTES
