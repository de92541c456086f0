"""Damages checkpoints at seeded places: each damage must be found and the newest good checkpoint be used instead.

    python tests/drills/damages.py --seed 1 --count 500

The writers of two ranks save four checkpoints: steps 10, 20 and 30 of one attempt, and step 30 of a second attempt,
which is the newest. Each holds different numbers. Every case damages a copy of that folder and loads it on one rank.
A case is good if the newest undamaged checkpoint was loaded with exactly its numbers, and exactly the damaged
checkpoints newer than it were set aside. The drill prints a table by kind of damage and exits with 1 if a case was not
good. `make faults` damages the checkpoints of runs of several ranks.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from drill import Verdict, at_least_one, options, print_verdicts
from rich.progress import track
from support import checkpoints as small
from support.checkpoints import committed, folder_name
from support.folder_contents import file_contents

from electra_dist.checkpoint.manifest import KINDS, MANIFEST, FileEntry, TensorEntry, tensors_of_header
from electra_dist.checkpoint.reader import load_newest
from electra_dist.checkpoint.stored_copies import SET_ASIDE
from electra_dist.store.open_store import open_store

SAVED = [(10, 1), (20, 1), (30, 1), (30, 2)]  # step, attempt: oldest first
NEWEST = folder_name(30, 2)
SAME_STEP, OLDER = folder_name(30, 1), folder_name(20, 1)
FILES = ["rank-00000.*.safetensors", "rank-00001.*.safetensors"]


def write_base(folder: Path) -> None:
    """Save the checkpoints of the run in `mine` and those of another run in `other`."""
    for name, run, fields in (("mine", 0, {}), ("other", 100, {"identity_sha256": "1" * 64})):
        for step, attempt in SAVED:
            store = open_store(str(folder / name))
            small.save([store], step, attempt, run=run + attempt, fields=fields)


@dataclass(frozen=True)
class DamageCase:
    """A damaged copy of the checkpoints."""

    kind: str  # key of KINDS_OF_DAMAGE
    description: str
    folder: Path
    damaged: frozenset[str]  # checkpoints that are no longer good
    gone: frozenset[str] = frozenset()  # checkpoints that no longer exist, so that there is nothing to set aside


class Damager:
    """Damages the newest checkpoint in the folder `mine`; each public method returns a description of its damage."""

    def __init__(self, mine: Path, other: Path, draw: random.Random) -> None:
        self.mine, self.other, self.draw = mine, other, draw
        self.newest = mine / NEWEST
        self.file = _only(self.newest, draw.choice(FILES))
        self.damaged, self.gone = {NEWEST}, set[str]()

    def header(self) -> str:
        """Change a byte of a file's header or of the 8 bytes that hold the header's length."""
        entry = self._entry()
        return self._flip(self.file, self.draw.choice([range(8), range(8, entry.header_bytes)]))

    def data(self, kind: str) -> str:
        """Change a byte of the data of `kind` of a random parameter."""
        entry = self._entry()
        tensors = tensors_of_header(entry, self.file.read_bytes()[: entry.header_bytes])
        tensor = self.draw.choice([t for t in tensors if t.kind == kind])
        return f"{tensor.name}: " + self._flip(self.file, _bytes_of(tensor))

    def manifest(self) -> str:
        """Change a byte of the manifest."""
        return self._flip(self.newest / MANIFEST)

    def manifest_spelling(self) -> str:
        """Rewrite the manifest as different JSON text of the same or nearly the same value."""
        path = self.newest / MANIFEST
        text = path.read_text()
        tree = json.loads(text)
        first_file = json.dumps(tree["files"][0])
        spellings = {
            "spaces": lambda: json.dumps(tree, sort_keys=True),
            "key order": lambda: json.dumps(dict(reversed(tree.items())), separators=(",", ":")) + "\n",
            "number": lambda: text.replace('"step":30', '"step":30.0'),
            "key twice": lambda: text.replace('"step":30', '"step":29,"step":30'),
            "step": lambda: text.replace('"step":30', '"step":31'),
            "a file less": lambda: text.replace(first_file + ",", ""),
            "no digest": lambda: json.dumps({k: v for k, v in tree.items() if k != "sha256"}, separators=(",", ":")),
        }
        name = self.draw.choice(list(spellings))
        path.write_text(spellings[name]())
        return name

    def truncated(self) -> str:
        """Cut off the end of a file or of the manifest."""
        path = self._any()
        data = path.read_bytes()
        sizes = [0, 1, 7, 8, len(data) - 1, self.draw.randrange(len(data)), self.draw.randrange(len(data))]
        size = self.draw.choice(sizes)
        path.write_bytes(data[:size])
        return f"{path.name} to {size} of {len(data)} bytes"

    def appended(self) -> str:
        """Append random bytes to a file or to the manifest."""
        path = self._any()
        extra = self.draw.randbytes(self.draw.choice([1, 8, 512, 4096]))
        path.write_bytes(path.read_bytes() + extra)
        return f"{len(extra)} bytes to {path.name}"

    def zeroed(self) -> str:
        """Overwrite 64 bytes of a file with zeros, as a lost page would."""
        data = bytearray(self.file.read_bytes())
        at = self.draw.randrange(len(data) - 64)
        data[at : at + 64] = bytes(64)
        self.file.write_bytes(data)
        return f"{self.file.name} from byte {at}"

    def blocks_swapped(self) -> str:
        """Exchange two blocks of 64 bytes of a file."""
        data = bytearray(self.file.read_bytes())
        first, second = sorted(self.draw.sample(range(0, len(data) - 64, 64), 2))
        first_block = data[first : first + 64]
        data[first : first + 64] = data[second : second + 64]
        data[second : second + 64] = first_block
        self.file.write_bytes(data)
        return f"bytes {first} and {second} of {self.file.name}"

    def missing_file(self) -> str:
        """Delete a file."""
        self.file.unlink()
        return self.file.name

    def missing_manifest(self) -> str:
        """Delete the manifest; without it the checkpoint does not exist."""
        (self.newest / MANIFEST).unlink()
        self.damaged, self.gone = set(), {NEWEST}
        return MANIFEST

    def swapped_ranks(self) -> str:
        """Exchange the files of the two ranks."""
        _swap(*(_only(self.newest, name) for name in FILES))
        return "files of rank 0 and 1"

    def swapped_steps(self) -> str:
        """Exchange a file, the manifest or the whole folder with a checkpoint of an older step."""
        return self._swapped_with(OLDER)

    def swapped_attempts(self) -> str:
        """Exchange a file, the manifest or the whole folder with a checkpoint of the same step of another attempt."""
        return self._swapped_with(SAME_STEP)

    def other_runs(self) -> str:
        """Replace a file, the manifest or the whole folder by that of another run."""
        name = self.draw.choice([*FILES, MANIFEST, None])
        if name is None:
            shutil.rmtree(self.newest)
            shutil.copytree(self.other / NEWEST, self.newest)
            return "everything"
        shutil.copy(_only(self.other / NEWEST, name), _only(self.newest, name))
        return str(name)

    def _swapped_with(self, folder: str) -> str:
        name = self.draw.choice([*FILES, MANIFEST, None])
        newest, other = self.newest, self.mine / folder
        if name is None:
            _swap(newest, other)
        else:
            _swap(_only(newest, name), _only(other, name))
        self.damaged.add(folder)
        return f"{name or 'everything'} with {folder}"

    def _entry(self) -> FileEntry:
        """Return the manifest's entry of `self.file`."""
        entry = FileEntry.parse(self.file.name)
        assert entry is not None
        return entry

    def _any(self) -> Path:
        """Return `self.file` or the manifest, at random."""
        return self.draw.choice([self.file, self.newest / MANIFEST])

    def _flip(self, path: Path, where: range | None = None) -> str:
        """Change one byte of a file, at an offset within `where` or anywhere, and describe it."""
        data = bytearray(path.read_bytes())
        at = self.draw.choice(where or range(len(data)))
        data[at] ^= self.draw.randrange(1, 256)
        path.write_bytes(data)
        return f"byte {at} of {path.name}"


KINDS_OF_DAMAGE: dict[str, Callable[[Damager], str]] = {
    "byte of a header": Damager.header,
    **{f"byte of {kind}": functools.partial(Damager.data, kind=kind) for kind in KINDS},
    "byte of a manifest": Damager.manifest,
    "manifest spelled otherwise": Damager.manifest_spelling,
    "truncated": Damager.truncated,
    "bytes appended": Damager.appended,
    "block of zeros": Damager.zeroed,
    "blocks swapped": Damager.blocks_swapped,
    "file missing": Damager.missing_file,
    "manifest missing": Damager.missing_manifest,
    "swapped between ranks": Damager.swapped_ranks,
    "swapped between steps": Damager.swapped_steps,
    "swapped between attempts": Damager.swapped_attempts,
    "another run's": Damager.other_runs,
}


def damaged_copy(base: Path, folder: Path, kind: str, draw: random.Random) -> DamageCase:
    """Return a case of `kind` in `folder`; draw again if the damage changed nothing (two equal blocks swapped)."""
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base / "mine", folder)
        damager = Damager(folder, base / "other", draw)
        description = KINDS_OF_DAMAGE[kind](damager)
        if file_contents(folder) != file_contents(base / "mine"):
            return DamageCase(kind, description, folder, frozenset(damager.damaged), frozenset(damager.gone))


def judged_load(case: DamageCase) -> str:
    """Load a case as a run of one rank does; return what is wrong with the outcome, empty if nothing."""
    store = open_store(str(case.folder))
    values = small.empty()
    state, notes, _ = load_newest([store], small.share(values, 0, 1), small.state_at(0))
    usable = [(step, attempt) for step, attempt in SAVED if folder_name(step, attempt) not in case.damaged | case.gone]
    best = max(usable)
    if state is None or (state.step, state.attempt) != best:
        return f"used {state and (state.step, state.attempt)}, not {best}"
    wanted = small.share(small.content(best[0], run=best[1]), 0, 1)
    if not all(
        (have.views[kind] == want.views[kind]).all()
        for have, want in zip(small.share(values, 0, 1), wanted, strict=True)
        for kind in KINDS
    ):
        return "the numbers are not those that were saved"
    newer = {folder for folder in case.damaged if folder > folder_name(*best)}
    aside = {path.parent.name for path in case.folder.glob(f"*/{SET_ASIDE}")}
    if aside != newer or len(notes) != len(newer) or {f for _, _, f in committed(store)} & newer:
        return f"set aside {sorted(aside)}, not {sorted(newer)}: {notes}"
    return ""


def drill(folder: Path, seed: int, count: int) -> list[Verdict]:
    """Return one verdict for each kind of damage, and one for each case that was not good."""
    draw = random.Random(seed)
    write_base(folder / "base")
    order = list(KINDS_OF_DAMAGE)
    bad, found, asked = list[str](), Counter[str](), Counter[str]()
    for number in track(range(count), "damages", transient=True):
        kind = order[number % len(order)]
        case = damaged_copy(folder / "base", folder / "case", kind, draw)
        asked[kind] += 1
        if text := judged_load(case):
            bad.append(f"{kind} ({case.description}): {text}")
        else:
            found[kind] += 1
    verdicts = [Verdict(kind, found[kind] == num, f"{found[kind]} of {num} found") for kind, num in asked.items()]
    return [*verdicts, *(Verdict("ACCEPTED", False, text) for text in bad)]


def _only(folder: Path, name: str) -> Path:
    """Return the only file of a folder whose name has the pattern `name`."""
    [file] = folder.glob(name)
    return file


def _bytes_of(tensor: TensorEntry) -> range:
    """Return the offsets of a tensor's bytes in its file."""
    return range(tensor.offset, tensor.offset + tensor.size_bytes)


def _swap(first: Path, second: Path) -> None:
    """Exchange the names of two files or folders."""
    temporary = first.with_name("swapping")
    first.rename(temporary)
    second.rename(first)
    temporary.rename(second)


def main() -> int:
    """Run the drill and return its exit code: 0 if every case was good."""
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=at_least_one, default=500, help="number of damages")
    args = parser.parse_args()
    begin = time.monotonic()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = drill(Path(folder), args.seed, args.count)
    return print_verdicts(f"{args.count} damages, seed {args.seed}, {time.monotonic() - begin:.0f} s", verdicts)


if __name__ == "__main__":
    sys.exit(main())
