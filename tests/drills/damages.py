"""Damages of every kind, at seeded places of a checkpoint: each must be found, and the newest good one used instead.

    python tests/drills/damages.py --seed 1 --count 500

Two ranks' writers save four checkpoints: step 10, 20 and 30 of one attempt, and step 30 of a second one, which is the
newest; each holds other numbers. Every case damages a copy of that folder and loads it, on one rank, and every
`--two-ranks-every`th one on two. A case is good if exactly the damaged checkpoints newer than the one used were set
aside, and every loaded number is that one's. Prints a table by kind and exits with 1 if anything was accepted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

import torch.distributed as dist
from rich.progress import Progress
from support import checkpoints as small
from support.real_runs import DrillVerdict, print_verdicts

from electra_dist.checkpoint.load import load_newest
from electra_dist.checkpoint.manifest import (
    KINDS,
    MANIFEST,
    SET_ASIDE,
    FileEntry,
    Manifest,
    TensorEntry,
    committed,
    folder_name,
)
from electra_dist.store.open import open_store

SAVED = [(10, 1), (20, 1), (30, 1), (30, 2)]  # step, attempt: oldest first
NEWEST = folder_name(30, 2)
SAME_STEP, OLDER = folder_name(30, 1), folder_name(20, 1)
FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]


def write_base(folder: Path) -> None:
    """The checkpoints of this run in `mine`, of another one in `other`."""
    for name, run, fields in (("mine", 0, {}), ("other", 100, {"identity_sha256": "1" * 64})):
        for step, attempt in SAVED:
            store = open_store(str(folder / name))
            small.save([store], folder / "staging", step, attempt, run=run + attempt, fields=fields)


@dataclass(frozen=True)
class DamageCase:
    """A copy of the base, damaged."""

    kind: str
    what: str
    folder: Path
    damaged: frozenset[str]  # checkpoints that are not good any more
    gone: frozenset[str] = frozenset()  # checkpoints that do not exist any more, so that nothing is to be set aside


class Damager:
    """One damage to the checkpoints in `mine`; each method describes what it did."""

    def __init__(self, mine: Path, other: Path, draw: random.Random) -> None:
        self.mine, self.other, self.draw = mine, other, draw
        self.newest = mine / NEWEST
        self.file = self.newest / draw.choice(FILES)
        self.damaged, self.gone = {NEWEST}, set[str]()

    def header(self) -> str:
        """A byte of the 8 that say how long the header is, or of the header."""
        entry = self._entry()
        return self._flip(self.file, self.draw.choice([range(8), range(8, entry.header_bytes)]))

    def data(self, kind: str) -> str:
        """A byte of one kind's data, of any parameter."""
        tensor = self.draw.choice([t for t in self._entry().tensors if t.kind == kind])
        return f"{tensor.name}: " + self._flip(self.file, _bytes_of(tensor))

    def manifest(self) -> str:
        return self._flip(self.newest / MANIFEST)

    def manifest_spelling(self) -> str:
        """The same JSON value, or nearly, in other bytes."""
        path = self.newest / MANIFEST
        text = path.read_text()
        tree = json.loads(text)
        first_tensor = json.dumps(tree["files"][0]["tensors"][0], separators=(",", ":"))
        found = {
            "spaces": lambda: json.dumps(tree, sort_keys=True),
            "key order": lambda: json.dumps(dict(reversed(tree.items())), separators=(",", ":")) + "\n",
            "number": lambda: text.replace('"step":30', '"step":30.0'),
            "key twice": lambda: text.replace('"step":30', '"step":29,"step":30'),
            "step": lambda: text.replace('"step":30', '"step":31'),
            "a tensor less": lambda: text.replace(first_tensor + ",", ""),
            "no digest": lambda: json.dumps({k: v for k, v in tree.items() if k != "sha256"}, separators=(",", ":")),
        }
        name = self.draw.choice(list(found))
        path.write_text(found[name]())
        return name

    def truncated(self) -> str:
        path = self._any()
        data = path.read_bytes()
        sizes = [0, 1, 7, 8, len(data) - 1, self.draw.randrange(len(data)), self.draw.randrange(len(data))]
        size = self.draw.choice(sizes)
        path.write_bytes(data[:size])
        return f"{path.name} to {size} of {len(data)} bytes"

    def appended(self) -> str:
        path = self._any()
        extra = self.draw.randbytes(self.draw.choice([1, 8, 512, 4096]))
        path.write_bytes(path.read_bytes() + extra)
        return f"{len(extra)} bytes to {path.name}"

    def zeroed(self) -> str:
        """A block of zeros, as after a lost page."""
        data = bytearray(self.file.read_bytes())
        at = self.draw.randrange(len(data) - 64)
        data[at : at + 64] = bytes(64)
        self.file.write_bytes(data)
        return f"{self.file.name} from byte {at}"

    def blocks_swapped(self) -> str:
        data = bytearray(self.file.read_bytes())
        one, two = sorted(self.draw.sample(range(0, len(data) - 64, 64), 2))
        data[one : one + 64], data[two : two + 64] = data[two : two + 64], data[one : one + 64]
        self.file.write_bytes(data)
        return f"bytes {one} and {two} of {self.file.name}"

    def missing_file(self) -> str:
        self.file.unlink()
        return self.file.name

    def missing_manifest(self) -> str:
        """Then it does not exist."""
        (self.newest / MANIFEST).unlink()
        self.damaged, self.gone = set(), {NEWEST}
        return MANIFEST

    def swapped_ranks(self) -> str:
        _swap(*(self.newest / name for name in FILES))
        return "files of rank 0 and 1"

    def swapped_steps(self) -> str:
        return self._swapped_with(OLDER)

    def swapped_attempts(self) -> str:
        return self._swapped_with(SAME_STEP)

    def other_runs(self) -> str:
        """A file, the manifest or all of another run."""
        name = self.draw.choice([*FILES, MANIFEST, None])
        if name is None:
            shutil.rmtree(self.newest)
            shutil.copytree(self.other / NEWEST, self.newest)
            return "everything"
        shutil.copy(self.other / NEWEST / name, self.newest / name)
        return str(name)

    def _swapped_with(self, folder: str) -> str:
        name = self.draw.choice([*FILES, MANIFEST, None])
        _swap(*(self.mine / each / name if name else self.mine / each for each in (NEWEST, folder)))
        self.damaged.add(folder)
        return f"{name or 'everything'} with {folder}"

    def _entry(self) -> FileEntry:
        manifest = Manifest.parse((self.newest / MANIFEST).read_bytes())
        return next(file for file in manifest.files if file.name == self.file.name)

    def _any(self) -> Path:
        return self.draw.choice([self.file, self.newest / MANIFEST])

    def _flip(self, path: Path, where: range | None = None) -> str:
        data = bytearray(path.read_bytes())
        at = self.draw.choice(where or range(len(data)))
        data[at] ^= self.draw.randrange(1, 256)
        path.write_bytes(data)
        return f"byte {at} of {path.name}"


KINDS_OF_DAMAGE: dict[str, Callable[[Damager], str]] = {
    "byte of a header": Damager.header,
    **{f"byte of {kind}": (lambda damager, kind=kind: damager.data(kind)) for kind in KINDS},
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
    """Case `kind` in `folder`; draws again if by chance nothing was changed (two equal blocks swapped)."""
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base / "mine", folder)
        damager = Damager(folder, base / "other", draw)
        what = KINDS_OF_DAMAGE[kind](damager)
        if _bytes_below(folder) != _bytes_below(base / "mine"):
            return DamageCase(kind, what, folder, frozenset(damager.damaged), frozenset(damager.gone))


def judged_load(case: DamageCase) -> str:
    """Load as this rank of the process group; what is wrong with the outcome, empty if nothing."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = open_store(str(case.folder))
    values = small.empty()
    state, notes = load_newest([store], small.share(values, rank, world_size), small.state_at(0))
    usable = [place for place in SAVED if folder_name(*place) not in case.damaged | case.gone]
    best = max(usable)
    if state is None or (state.step, state.attempt) != best:
        return f"used {state and (state.step, state.attempt)}, not {best}"
    wanted = small.share(small.content(best[0], run=best[1]), rank, world_size)
    if not all(
        (have.views[kind] == want.views[kind]).all()
        for have, want in zip(small.share(values, rank, world_size), wanted, strict=True)
        for kind in KINDS
    ):
        return "the numbers are not those that were saved"
    newer = {folder for folder in case.damaged if folder > folder_name(*best)}
    aside = {path.parent.name for path in case.folder.glob(f"*/{SET_ASIDE}")}
    if aside != newer or len(notes) != len(newer) or {f for _, _, f in committed(store)} & newer:
        return f"set aside {sorted(aside)}, not {sorted(newer)}: {notes}"
    return ""


def _load_all(cases: Sequence[DamageCase], rank: int, meeting: Path, outcomes: Queue) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2)
    for number, case in enumerate(cases):
        outcomes.put((number, judged_load(case)))
        dist.barrier()
    dist.destroy_process_group()


def judged_by_two_ranks(cases: Sequence[DamageCase], meeting: Path, advance: Callable[[], None]) -> list[str]:
    """What two ranks together say of each case."""
    fork = multiprocessing.get_context("fork")
    outcomes = fork.Queue()
    ranks = [fork.Process(target=_load_all, args=(cases, rank, meeting, outcomes), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    texts = [""] * len(cases)
    for _ in range(2 * len(cases)):
        number, text = outcomes.get(timeout=60)
        texts[number] = texts[number] or text
        advance()
    for process in ranks:
        process.join()
    return texts


def drill(folder: Path, seed: int, count: int, two_ranks_every: int) -> list[DrillVerdict]:
    """One verdict for each kind; a one-rank process group must exist, and is not there afterwards."""
    draw = random.Random(seed)
    write_base(folder / "base")
    order = list(KINDS_OF_DAMAGE)
    cases = [
        damaged_copy(folder / "base", folder / f"case-{number}", order[number % len(order)], draw)
        for number in range(count)
    ]
    pairs, bad = [], list[str]()
    found, on_two = Counter[str](), Counter[str]()
    with Progress(transient=True) as progress:
        task = progress.add_task("damages", total=count)
        for number, case in enumerate(cases):
            if (number + number // len(order)) % two_ranks_every == 0:  # all kinds in turn
                pairs.append(case)
                continue
            if text := judged_load(case):
                bad.append(f"{case.kind} ({case.what}): {text}")
            else:
                found[case.kind] += 1
            progress.advance(task)
        dist.destroy_process_group()  # it does not outlive a fork
        for case, text in zip(
            pairs, judged_by_two_ranks(pairs, folder / "meeting", lambda: progress.advance(task, 0.5))
        ):
            if text:
                bad.append(f"{case.kind} ({case.what}), on two ranks: {text}")
            else:
                found[case.kind] += 1
                on_two[case.kind] += 1
    asked = Counter(case.kind for case in cases)
    verdicts = [
        DrillVerdict(
            kind, found[kind] == asked[kind], f"{found[kind]} of {asked[kind]} found, {on_two[kind]} on two ranks"
        )
        for kind in order
        if asked[kind]
    ]
    return [*verdicts, *(DrillVerdict("ACCEPTED", False, text) for text in bad)]


def _bytes_of(tensor: TensorEntry) -> range:
    return range(tensor.offset, tensor.offset + tensor.size_bytes)


def _bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _swap(one: Path, two: Path) -> None:
    between = one.with_name("swapping")
    one.rename(between)
    two.rename(one)
    between.rename(two)


def start_process_group() -> None:
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500, help="damages")
    parser.add_argument("--two-ranks-every", type=int, default=5, help="every how manyeth is loaded on two ranks")
    args = parser.parse_args()
    begin = time.monotonic()
    start_process_group()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = drill(Path(folder), args.seed, args.count, args.two_ranks_every)
    return print_verdicts(f"{args.count} damages, seed {args.seed}, {time.monotonic() - begin:.0f} s", verdicts)


if __name__ == "__main__":
    sys.exit(main())
