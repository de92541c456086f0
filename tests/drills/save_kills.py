"""Kills -9 around saves at seeded moments: a good checkpoint must always remain, and the run resume from the newest.

    python tests/drills/save_kills.py --target local --seed 1 --count 200
    python tests/drills/save_kills.py --target s3      # a server process: radosgw if installed, otherwise moto
    python tests/drills/save_kills.py --target both    # every checkpoint in a local folder and on S3

Two processes act as the two ranks of a run and save one checkpoint after the other, with retention (the last two and
the best). Half of the kills happen at a seeded operation of the store (just before it or just after), half at a
seeded time after the start. The victim is rank 0, rank 1 or both; a survivor is killed a moment later, as a launcher
does. On S3, files are uploaded in parts. After each kill every committed checkpoint of every target must be undamaged
and hold the right numbers, the newest must be the last reported one or a newer one, and the next start must load it
without setting anything aside. After one more start no file of dead attempts may remain. The drill prints a table by
place of the kill and exits with 1 if anything was wrong.

Limits: kill -9 loses nothing that the kernel holds. Only fsync protects against power cuts, which are not simulated.
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

import electra_dist.store.s3_store
from electra_dist.checkpoint.background_writer import CheckpointWriter
from electra_dist.checkpoint.checkpoint_manifest import MANIFEST, committed
from electra_dist.checkpoint.commit import begin_attempt, leftovers
from electra_dist.checkpoint.file_reader import fill, verify
from electra_dist.checkpoint.restore_state import load_newest
from electra_dist.config import CheckpointConfig
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}
POLICY = CheckpointConfig(keep_last=2, keep_best=1)
FORK = multiprocessing.get_context("fork")
PATIENCE_S = 120.0
PARTS_FROM_BYTES = 5 << 20  # S3 refuses smaller parts


@dataclass(frozen=True)
class SaveKill:
    """Moment of a kill: at an operation of the victim's store, or at a time after the start."""

    victim: int | None  # rank; None: both
    operation: int | None  # number of the victim's store operation, from 1; None: kill at `time_s`
    after: bool  # kill just after the operation rather than just before it
    time_s: float  # seconds after the start, if `operation` is None
    other_s: float  # seconds until the survivor is killed, too

    @classmethod
    def draw(cls, draw: random.Random, number: int, longest_s: float) -> SaveKill:
        """Return a random kill: at a time of at most `longest_s` if `number` is odd, otherwise at an operation."""
        other_s = draw.choice([0.0, draw.uniform(0.0, 0.05)])
        if number % 2:
            return cls(draw.choice([0, 1, None]), None, False, draw.uniform(0.0, longest_s), other_s)
        victim = draw.choice([0, 0, 0, 1])
        return cls(victim, draw.randint(1, 12 if victim else 90), draw.random() < 0.5, 0.0, other_s)


class Watched(Store):
    """Store that records its current operation in shared memory and kills its own process at a given operation."""

    def __init__(self, inner: Store, place: Any, kill: SaveKill | None, counter: Iterator[int]) -> None:
        self.url = inner.url
        self._inner, self._place, self._kill, self._counter = inner, place, kill, counter

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Perform the operation `name` of the inner store, recording it, and kill this process if it is due."""
        number = next(self._counter)
        what = f"{name} {_sort_of(str(args[0]) if args else '')}"
        self._place.value = f"before {what}".encode()[:63]
        self._strike(number, after=False)
        result = getattr(self._inner, name)(*args, **kwargs)
        self._place.value = f"after {what}".encode()[:63]
        self._strike(number, after=True)
        return result

    def _strike(self, number: int, after: bool) -> None:
        """Kill this process if the kill is due before (or after) operation `number`."""
        if self._kill and self._kill.operation == number and self._kill.after == after:
            os.kill(os.getpid(), signal.SIGKILL)


def _watched(name: str) -> Callable[..., Any]:
    """Return a method of Watched that performs the operation `name`."""
    return lambda self, *args, **kwargs: self._do(name, *args, **kwargs)


for _name in Store.__abstractmethods__:
    setattr(Watched, _name, _watched(_name))
Watched.__abstractmethods__ = frozenset()


def _sort_of(key: str) -> str:
    """Return the kind of object that a key names."""
    for end, sort in ((MANIFEST, "manifest"), (".safetensors", "file"), (".json", "attempt or entry")):
        if key.endswith(end):
            return sort
    return "folder"


def fields_at(step: int) -> dict[str, Any]:
    """Return a pseudo-random evaluation loss of a step, by which retention chooses the best checkpoint."""
    return {"eval_rtd_loss": step * 7919 % 13 / 13}


def act_as_rank_0(targets: Sequence[Store], staging: Path, report: Connection, other: Connection) -> None:
    """Act as rank 0 of one start of the run: begin an attempt, load, then save until killed.

    Args:
        targets: where checkpoints are saved.
        staging: local folder for files before their upload.
        report: receives ("loaded", step, fault) once and ("committed", step, "") for each checkpoint.
        other: receives the attempt, then each step that rank 1 is to save.
    """
    attempt = begin_attempt(targets, RUN)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = small.empty()
    state, notes = load_newest(targets, small.share(values, 0, 1), small.state_at(0, attempt))
    step = state.step if state else 0
    right = small.equal(values, small.content(step)) if state else True
    fault = "; ".join(notes)
    if not fault and not right:
        fault = "wrong numbers"
    report.send(("loaded", step, fault))
    writer = CheckpointWriter(targets, staging, 0, attempt, POLICY)
    writer.on_commit = lambda state, timing, seconds: report.send(("committed", state.step, ""))
    other.send(attempt)
    while True:
        step += 1
        other.send(step)
        fragments = small.share(small.content(step), 0, 2)
        writer.save(small.state_at(step, attempt, **fields_at(step)), fragments)


def act_as_rank_1(targets: Sequence[Store], staging: Path, rank_0: Connection) -> None:
    """Act as rank 1: save each step that rank 0 sends, until killed."""
    attempt = rank_0.recv()
    writer = CheckpointWriter(targets, staging, 1, attempt, POLICY)
    while True:
        step = rank_0.recv()
        fragments = small.share(small.content(step), 1, 2)
        writer.save(small.state_at(step, attempt, **fields_at(step)), fragments)


@dataclass
class DrillStart:
    """Observations of one start of the run until it was killed."""

    place: str = "before the first operation"  # where the kill met it
    loaded: int | None = None  # step; None if it was killed before it had loaded
    fault: str = ""  # what went wrong; empty: nothing
    committed: list[int] = field(default_factory=list)  # steps


class DrillRun:
    """A run that is started and killed repeatedly, with the same targets."""

    def __init__(self, targets: Sequence[Store], staging: Path) -> None:
        self.targets, self.staging = targets, staging
        self.reported = 0  # newest step that was ever reported committed

    def start(self, kill: SaveKill | None, until_commits: int = 0) -> DrillStart:
        """Start both ranks, kill them and return what was observed.

        Args:
            kill: moment of the kill; None: once `until_commits` checkpoints are committed.
            until_commits: used without `kill`, to time a start and for the last one.
        """
        places = [FORK.Array(ctypes.c_char, 64, lock=False) for _ in range(2)]
        report, reporting = FORK.Pipe(duplex=False)
        steps_in, steps_out = FORK.Pipe(duplex=False)
        watched = [
            [Watched(t, places[rank], kill if kill and kill.victim == rank else None, counter) for t in self.targets]
            for rank, counter in enumerate((iter(range(1, 10**9)), iter(range(1, 10**9))))
        ]
        ranks = [
            FORK.Process(target=_quietly, args=(act_as_rank_0, watched[0], self.staging, reporting, steps_out)),
            FORK.Process(target=_quietly, args=(act_as_rank_1, watched[1], self.staging, steps_in)),
        ]
        for process in ranks:
            process.start()
        outcome = DrillStart()
        try:
            if kill is None:
                while len(outcome.committed) < until_commits and report.poll(PATIENCE_S):
                    self._receive(outcome, report)
            elif kill.operation is None:
                wait([process.sentinel for process in ranks], timeout=kill.time_s)
            elif not wait([process.sentinel for process in ranks], timeout=PATIENCE_S):
                outcome.fault = f"operation {kill.operation} of rank {kill.victim} never came"
            self._kill(ranks, kill, outcome)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        while report.poll(0):
            self._receive(outcome, report)
        victim = kill.victim or 0 if kill else 0
        place = places[victim].value.decode()
        outcome.place = place or outcome.place
        for end in (report, reporting, steps_in, steps_out):
            end.close()
        return outcome

    def _kill(self, ranks: Sequence[Any], kill: SaveKill | None, outcome: DrillStart) -> None:
        """Kill the victim, then the survivor; record a rank that has ended by itself as a fault."""
        for process in ranks:
            if process.sentinel in wait([process.sentinel], timeout=0):
                process.join()  # its exit code is set a moment after its end
            if process.exitcode not in (None, -signal.SIGKILL):
                outcome.fault = outcome.fault or f"a rank ended by itself with code {process.exitcode}"
        first = [0, 1] if kill is None or kill.victim is None else [kill.victim]
        for rank in first:
            ranks[rank].kill()
        time.sleep(kill.other_s if kill else 0.0)

    def _receive(self, outcome: DrillStart, report: Connection) -> None:
        """Receive one report of rank 0 and record it."""
        event, step, fault = report.recv()
        if event == "committed":
            outcome.committed.append(step)
            self.reported = max(self.reported, step)
        else:
            outcome.loaded = step
            outcome.fault = outcome.fault or fault

    def fault(self) -> str:
        """Return what is wrong with the checkpoints after a kill; empty if nothing."""
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
        """Return the newest committed step of all targets, 0 if there is none."""
        return max((step for target in self.targets for step, _, _ in committed(target)), default=0)


def _quietly(act: Callable[..., None], *args: Any) -> None:
    """Call `act`, ignoring a connection that breaks because the other rank was killed."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        act(*args)


def drill(run: DrillRun, seed: int, count: int) -> list[DrillVerdict]:
    """Kill a run `count` times, start it once more, and return the verdicts."""
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
    if last.fault or not last.committed:
        bad.append(f"the last start: {last.fault}")
    attempt = begin_attempt(run.targets, RUN)
    for target in run.targets:
        bad += [f"left over: {target.url}/{key}" for key in leftovers(target, attempt)]
        unseen = target.discard_unfinished("step-", lambda key: True)
        if unseen:
            bad.append(f"{unseen} unfinished writes in {target.url}")
    places = [DrillVerdict("killed", True, f"{times:3} x {place}") for place, times in sorted(killed.items())]
    summary = f"{count - len(bad)} of {count} kills left good checkpoints; newest step {run.newest()}"
    return [*places, DrillVerdict("all", not bad, summary), *(DrillVerdict("WRONG", False, text) for text in bad)]


@contextlib.contextmanager
def open_targets(kind: str, folder: Path, server: str | None) -> Iterator[list[Store]]:
    """Open empty checkpoint targets for the length of the block.

    Args:
        kind: `local`, `s3` or `both`.
        folder: where the local target is made.
        server: `radosgw` or `moto`; None: the best one that is installed.
    """
    with contextlib.ExitStack() as stack:
        targets = [open_store(str(folder / "checkpoints"))] if kind != "s3" else []
        if kind != "local":
            endpoint_url, env = stack.enter_context(s3_server.running_s3(server))
            os.environ.update(env)
            targets.append(open_store(f"{s3_server.make_bucket(endpoint_url, env, 'kills')}/run", endpoint_url))
        yield targets


def main() -> int:
    """Run the drill and return its exit code: 0 if every kill left good checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=["local", "s3", "both"], default="local")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="number of kills")
    parser.add_argument(
        "--server", choices=["radosgw", "moto"], help="S3 server (default: radosgw if it is installed, otherwise moto)"
    )
    args = parser.parse_args()
    small.SHAPES["word.weight"] = [10_000, 100]  # 12 MB of state, so that writes take long enough to be hit by a kill
    electra_dist.store.s3_store._MULTIPART_FROM = electra_dist.store.s3_store._PART = PARTS_FROM_BYTES
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open_targets(args.target, Path(folder), args.server) as targets:
        verdicts = drill(DrillRun(targets, Path(folder) / "staging"), args.seed, args.count)
    taken = f"{args.count} kills, {args.target}, seed {args.seed}, {time.monotonic() - begin:.0f} s"
    return print_verdicts(taken, verdicts)


if __name__ == "__main__":
    sys.exit(main())
