"""kill -9 around saves, at seeded moments: a good checkpoint always remains, and the run goes on from the newest.

    python tests/drills/save_kills.py --target local --seed 1 --count 200
    python tests/drills/save_kills.py --target s3      # a server process: radosgw where it is installed, else moto
    python tests/drills/save_kills.py --target both    # every checkpoint in a local folder and on S3

Two processes save as the two ranks of a run, one checkpoint after the other, with retention (the last two and the
best). Half of the kills strike at a seeded operation of the store (just before it, or just after), half at a seeded
time after the start; the victim is rank 0, rank 1 or both, and the survivor is killed a moment later, as a launcher
does. On S3 files go up in parts. After each kill every committed checkpoint of every target must be good to the last
byte, the newest must be the last one that was reported or a newer one and hold the right numbers, and the next start
must load it without setting anything aside. After one more start nothing of dead attempts may be left. Prints a table
by place of the kill and exits with 1 if anything was wrong.

Where it stops: kill -9 loses nothing that the kernel holds; what a power cut may lose is covered by fsync alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

import torch.distributed as dist
from rich.progress import Progress
from support import checkpoints as small
from support import s3_server
from support.real_runs import DrillVerdict, print_verdicts

import electra_dist.store.s3
from electra_dist.checkpoint.commit import begin_attempt, leftovers
from electra_dist.checkpoint.load import load_newest
from electra_dist.checkpoint.manifest import MANIFEST, committed
from electra_dist.checkpoint.read import fill, verify
from electra_dist.checkpoint.save import CheckpointWriter
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}
POLICY = CheckpointConfig(keep_last=2, keep_best=1)
FORK = multiprocessing.get_context("fork")
PATIENCE_S = 120.0
PARTS_FROM_BYTES = 5 << 20  # S3 refuses smaller parts


@dataclass(frozen=True)
class SaveKill:
    """When: at an operation of the store of `victim`, or at a time."""

    victim: int | None  # rank; None: both
    operation: int | None  # number of the operation of that rank, from 1
    after: bool  # the operation, rather than before it
    time_s: float  # after the start, if it is not an operation
    other_s: float  # until the survivor is killed, too

    @classmethod
    def draw(cls, draw: random.Random, number: int, longest_s: float) -> SaveKill:
        other_s = draw.choice([0.0, draw.uniform(0.0, 0.05)])
        if number % 2:
            return cls(draw.choice([0, 1, None]), None, False, draw.uniform(0.0, longest_s), other_s)
        victim = draw.choice([0, 0, 0, 1])
        return cls(victim, draw.randint(1, 12 if victim else 90), draw.random() < 0.5, 0.0, other_s)


class Watched(Store):
    """A store that writes down what it is doing, and kills its own process at a given operation."""

    def __init__(self, inner: Store, place: Any, kill: SaveKill | None, counter: Iterator[int]) -> None:
        self.url = inner.url
        self._inner, self._place, self._kill, self._counter = inner, place, kill, counter

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        number = next(self._counter)
        what = f"{name} {_sort_of(str(args[0]) if args else '')}"
        self._place.value = f"before {what}".encode()[:63]
        self._strike(number, after=False)
        result = getattr(self._inner, name)(*args, **kwargs)
        self._place.value = f"after {what}".encode()[:63]
        self._strike(number, after=True)
        return result

    def _strike(self, number: int, after: bool) -> None:
        if self._kill and self._kill.operation == number and self._kill.after == after:
            os.kill(os.getpid(), signal.SIGKILL)


def _watched(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._do(name, *args, **kwargs)


for _name in Store.__abstractmethods__:
    setattr(Watched, _name, _watched(_name))
Watched.__abstractmethods__ = frozenset()


def _sort_of(key: str) -> str:
    """What kind of object a key names."""
    for end, sort in ((MANIFEST, "manifest"), (".safetensors", "file"), (".json", "attempt or entry")):
        if key.endswith(end):
            return sort
    return "folder"


def fields_at(step: int) -> dict[str, Any]:
    return {"eval_rtd_loss": step * 7919 % 13 / 13}


def act_as_rank_0(targets: Sequence[Store], staging: Path, report: Connection, other: Connection) -> None:
    """A start of the run: take a number, load, save for ever."""
    attempt = begin_attempt(targets, RUN)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = small.empty()
    state, notes = load_newest(targets, small.share(values, 0, 1), small.state_at(0, attempt))
    step = state.step if state else 0
    right = small.equal(values, small.content(step)) if state else True
    report.send(("loaded", step, "; ".join(notes) if notes else "" if right else "wrong numbers"))
    writer = CheckpointWriter(targets, staging, 0, attempt, POLICY)
    writer.on_commit = lambda state, timing, seconds: report.send(("committed", state.step, ""))
    other.send(attempt)
    while True:
        step += 1
        other.send(step)
        fragments = small.share(small.content(step), 0, 2)
        writer.save(small.state_at(step, attempt, **fields_at(step)), fragments)


def act_as_rank_1(targets: Sequence[Store], staging: Path, rank_0: Connection) -> None:
    """Save whatever step rank 0 is at."""
    attempt = rank_0.recv()
    writer = CheckpointWriter(targets, staging, 1, attempt, POLICY)
    while True:
        step = rank_0.recv()
        fragments = small.share(small.content(step), 1, 2)
        writer.save(small.state_at(step, attempt, **fields_at(step)), fragments)


@dataclass
class DrillStart:
    """What one start of the run did until it was killed."""

    place: str = "before the first operation"
    loaded: int | None = None
    fault: str = ""
    committed: list[int] = field(default_factory=list)


class DrillRun:
    """The run: its targets, started and killed again and again."""

    def __init__(self, targets: Sequence[Store], staging: Path) -> None:
        self.targets, self.staging = targets, staging
        self.reported = 0  # newest step that was ever reported committed

    def start(self, kill: SaveKill | None, until_commits: int = 0) -> DrillStart:
        """Start both ranks; until the kill, or (for timing) until so many commits."""
        places = [FORK.Array(ctypes.c_char, 64, lock=False) for _ in range(2)]
        report, reporting = FORK.Pipe(duplex=False)
        hearing, telling = FORK.Pipe(duplex=False)
        watched = [
            [Watched(t, places[rank], kill if kill and kill.victim == rank else None, counter) for t in self.targets]
            for rank, counter in enumerate((iter(range(1, 10**9)), iter(range(1, 10**9))))
        ]
        ranks = [
            FORK.Process(target=_quietly, args=(act_as_rank_0, watched[0], self.staging, reporting, telling)),
            FORK.Process(target=_quietly, args=(act_as_rank_1, watched[1], self.staging, hearing)),
        ]
        for process in ranks:
            process.start()
        found = DrillStart()
        try:
            if kill is None:
                while len(found.committed) < until_commits and report.poll(PATIENCE_S):
                    self._hear(found, report)
            elif kill.operation is None:
                wait([process.sentinel for process in ranks], timeout=kill.time_s)
            elif not wait([process.sentinel for process in ranks], timeout=PATIENCE_S):
                found.fault = f"operation {kill.operation} of rank {kill.victim} never came"
            self._kill(ranks, kill, found)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        while report.poll(0):
            self._hear(found, report)
        place = places[kill.victim or 0 if kill else 0].value.decode()
        found.place = place or found.place
        for end in (report, reporting, hearing, telling):
            end.close()
        return found

    def _kill(self, ranks: Sequence[Any], kill: SaveKill | None, found: DrillStart) -> None:
        for process in ranks:
            if process.sentinel in wait([process.sentinel], timeout=0):
                process.join()  # its exit code comes a moment after its end
            if process.exitcode not in (None, -signal.SIGKILL):
                found.fault = found.fault or f"a rank ended by itself with code {process.exitcode}"
        first = [0, 1] if kill is None or kill.victim is None else [kill.victim]
        for rank in first:
            ranks[rank].kill()
        time.sleep(kill.other_s if kill else 0.0)

    def _hear(self, found: DrillStart, report: Connection) -> None:
        what, step, fault = report.recv()
        if what == "committed":
            found.committed.append(step)
            self.reported = max(self.reported, step)
        else:
            found.loaded = step
            found.fault = found.fault or fault

    def fault(self) -> str:
        """What is wrong with what a kill left; empty if nothing."""
        newest = []
        for target in self.targets:
            there = committed(target)
            for _, _, folder in there:
                manifest, faults = verify(target, folder)
                if faults:
                    return f"{target.url}/{folder}: {faults[0]}"
                values = small.empty()
                assert manifest is not None
                fill(target, folder, manifest, small.share(values, 0, 1), ())
                if not small.equal(values, small.content(manifest.state.step)):
                    return f"{target.url}/{folder} holds other numbers"
            newest.append(max((step for step, _, _ in there), default=0))
        if min(newest) < self.reported:
            return f"step {self.reported} was reported committed, the newest is {newest}"
        return ""

    def newest(self) -> int:
        return max((step for target in self.targets for step, _, _ in committed(target)), default=0)


def _quietly(act: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other rank was killed
        act(*args)


def drill(run: DrillRun, seed: int, count: int) -> list[DrillVerdict]:
    """`count` kills and what they left."""
    draw = random.Random(seed)
    begin = time.monotonic()
    run.start(None, until_commits=3)
    longest_s = 1.5 * (time.monotonic() - begin)
    killed, bad = Counter[str](), list[str]()
    with Progress(transient=True) as progress:
        for number in progress.track(range(count), description=f"kills ({longest_s:.1f} s a start)"):
            before, kill = run.newest(), SaveKill.draw(draw, number, longest_s)
            start = run.start(kill)
            killed[f"{'time' if kill.operation is None else 'operation'}: {start.place}"] += 1
            fault = start.fault or run.fault()
            if not fault and start.loaded not in (None, before):
                fault = f"step {before} was the newest, {start.loaded} was loaded"
            if fault:
                bad.append(f"kill {number}, {kill}, {start.place}: {fault}")
    last = run.start(None, until_commits=1)
    bad += [f"the last start: {last.fault}"] if last.fault or not last.committed else []
    attempt = begin_attempt(run.targets, RUN)
    for target in run.targets:
        bad += [f"left over: {target.url}/{key}" for key in leftovers(target, attempt)]
        if unseen := target.discard_unfinished("step-", lambda key: True):
            bad.append(f"{unseen} unfinished writes in {target.url}")
    places = [DrillVerdict("killed", True, f"{times:3} x {place}") for place, times in sorted(killed.items())]
    summary = f"{count - len(bad)} of {count} kills left good checkpoints; newest step {run.newest()}"
    return [*places, DrillVerdict("all", not bad, summary), *(DrillVerdict("WRONG", False, text) for text in bad)]


@contextlib.contextmanager
def open_targets(kind: str, folder: Path, server: str | None) -> Iterator[list[Store]]:
    """Empty targets."""
    with contextlib.ExitStack() as stack:
        targets = [open_store(str(folder / "checkpoints"))] if kind != "s3" else []
        if kind != "local":
            endpoint_url, env = stack.enter_context(s3_server.running_s3(server))
            os.environ.update(env)
            targets.append(open_store(f"{s3_server.make_bucket(endpoint_url, env, 'kills')}/run", endpoint_url))
        yield targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=["local", "s3", "both"], default="local")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="kills")
    parser.add_argument("--server", choices=["radosgw", "moto"], help="S3 server; default: the best there is")
    args = parser.parse_args()
    small.SHAPES["word.weight"] = [10_000, 100]  # 12 MB of state, so that a kill meets a write
    electra_dist.store.s3._MULTIPART_FROM = electra_dist.store.s3._PART = PARTS_FROM_BYTES
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open_targets(args.target, Path(folder), args.server) as targets:
        verdicts = drill(DrillRun(targets, Path(folder) / "staging"), args.seed, args.count)
    taken = f"{args.count} kills, {args.target}, seed {args.seed}, {time.monotonic() - begin:.0f} s"
    return print_verdicts(taken, verdicts)


if __name__ == "__main__":
    sys.exit(main())
