"""Runs the short run uninterrupted and then with each kill, in several worker processes."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

from drills.forks import run_in_fork
from drills.kill_matrix.comparison import (
    Remains,
    checkpoint_faults,
    newest_checkpoint,
    read_lines,
    read_remains,
)
from drills.kill_matrix.durable_operations import Kill, Operation
from drills.kill_matrix.short_run import PHASES, SECOND_CORPUS, Trial, copy_run, delete_run, expected_codes, run_phase
from support.real_runs import write_corpus
from support.s3_server import S3Server

Result = TypeVar("Result")

_FORK = multiprocessing.get_context("fork")
_MOST_ATTEMPTS = 3  # at one part of the run, the killed one included


class KillResult(NamedTuple):
    """Result of one kill."""

    number: int  # of the operation, from 1
    kill: Kill
    was_reached: bool  # whether the operation came and the process was killed
    differences: list[str]  # from the uninterrupted run
    seconds: float


@dataclass
class Matrix:
    """The uninterrupted run, and everything that is needed to repeat it with a kill."""

    folder: Path
    bucket: str
    server: S3Server
    operations: list[Operation] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    expected: Remains | None = None
    seconds: float = 0.0  # of the uninterrupted run

    @property
    def corpus(self) -> str:
        """The URL of the corpus, which is in the container with Azurite, and in a folder with S3."""
        return f"{self.bucket if self.bucket.startswith('az:') else self.folder}/corpus"

    def trial(self, name: str) -> Trial:
        """Return the place of a run."""
        return Trial(self.folder / name, self.bucket, self.server)

    def state_before(self, phase: str) -> Trial:
        """Return the copy of the uninterrupted run before one of its parts."""
        return self.trial(f"before-{phase.replace(' ', '-')}")

    def run_uninterrupted(self) -> None:
        """Run all parts without a kill, number their operations, and keep a copy of the state before each part."""
        run_in_fork(self._write_corpora, self.folder / "corpus.txt")
        trial = self.trial("uninterrupted")
        trial.watched.mkdir(parents=True)
        begin = time.monotonic()
        for phase in PHASES:
            copy_run(trial, self.state_before(phase))
            end = run_phase(trial, self.corpus, phase, None)
            assert set(end.codes) == expected_codes(phase), output(trial, f"{phase} ended with {end.codes}")
            self.operations += end.operations
            self.missed += end.missed
        self.seconds = time.monotonic() - begin
        self.expected = read_remains(trial)
        assert not self.expected.faults, self.expected.faults

    def _write_corpora(self) -> None:
        url = self.server.endpoint_url
        write_corpus(self.corpus, [70, 33, 48], endpoint_url=url)
        write_corpus(f"{self.corpus}/heldout", [24], seed=9, endpoint_url=url)
        write_corpus(f"{self.corpus}/{SECOND_CORPUS}", [11, 19], seed=4, endpoint_url=url)

    def kills(self) -> list[tuple[int, Kill]]:
        """Return all kills, each with the number of its operation, from 1."""
        numbered = enumerate(self.operations, start=1)
        return [(number, Kill(operation, moment)) for number, operation in numbered for moment in operation.moments]

    def run_killed(self, number: int, kill: Kill) -> KillResult:
        """Repeat the run from the part in which the kill comes, and compare what it has left.

        The folder of a run that differs is kept.
        """
        begin = time.monotonic()
        trial = self.trial(f"kill-{number}-{kill.moment}")
        first = kill.operation.phase
        copy_run(self.state_before(first), trial)
        was_reached = False
        differences: list[str] = []
        for phase in PHASES[PHASES.index(first) :]:
            end = run_phase(trial, self.corpus, phase, kill if phase == first else None)
            if end.was_killed:
                was_reached = True
                differences += in_fork(checkpoint_faults, trial)
            differences += self._finish(trial, phase, end.codes if not end.was_killed else None)
            if differences:
                break
        if not differences:
            assert self.expected is not None
            differences = read_remains(trial).differences(self.expected)
        if not differences:
            delete_run(trial)
        return KillResult(number, kill, was_reached, differences, time.monotonic() - begin)

    def _finish(self, trial: Trial, phase: str, codes: list[int] | None) -> list[str]:
        """Start a part of the run again until it ends as it should; describe what went wrong.

        Args:
            trial: the run.
            phase: the part.
            codes: exit codes of the first attempt; None: it was killed.
        """
        attempts = 1
        while codes is None or set(codes) != expected_codes(phase):
            if codes is not None or attempts == _MOST_ATTEMPTS:
                return [output(trial, f"{phase} ended with {codes}")]
            newest = in_fork(newest_checkpoint, trial)
            ledger = trial.run_dir / "ledger.jsonl"
            num_events = len(read_lines(ledger))
            codes = run_phase(trial, self.corpus, phase, None).codes
            attempts += 1
            begun = [event for event in read_lines(ledger)[num_events:] if event["event"] in ("start", "resume")]
            if begun and begun[0]["step"] != newest:
                return [f"{phase} began at step {begun[0]['step']}, the newest checkpoint was {newest}"]
        return []


def in_fork(act: Callable[[Trial], Result], trial: Trial) -> Result:
    """Return what a function says of a run. It opens stores, and obstore's threads do not survive a fork."""
    file = trial.folder / "result.pickle"
    run_in_fork(lambda: file.write_bytes(pickle.dumps(act(trial))), trial.folder / "output.txt")
    return pickle.loads(file.read_bytes())


def output(trial: Trial, reason: str) -> str:
    """Return a reason with the last lines that the processes of a run have printed."""
    file = trial.folder / "output.txt"
    text = file.read_text(errors="replace") if file.exists() else ""
    return f"{reason}; {file}: {text[-1500:]}"


def run_kills(matrix: Matrix, kills: Sequence[tuple[int, Kill]], num_workers: int) -> Iterator[KillResult]:
    """Run kills in worker processes, which are forked from this one, and return the results as they come.

    Raises:
        RuntimeError: a worker has ended before its last kill.
    """
    readers: dict[Connection, int] = {}  # -> number of results that are still to come
    workers = []
    for worker in range(num_workers):
        share = kills[worker::num_workers]
        reader, writer = _FORK.Pipe(duplex=False)
        workers.append(_FORK.Process(target=_work, args=(matrix, share, writer)))
        workers[-1].start()
        writer.close()
        readers[reader] = len(share)
    try:
        while readers:
            for reader in wait(list(readers)):
                assert isinstance(reader, Connection)
                try:
                    result = reader.recv()
                except EOFError:
                    if readers.pop(reader):
                        raise RuntimeError("a worker has ended before its last kill; its error is above") from None
                    continue
                readers[reader] -= 1
                yield result
    finally:
        for process in workers:
            process.terminate()
            process.join()


def _work(matrix: Matrix, kills: Sequence[tuple[int, Kill]], results: Connection) -> None:
    """Run kills one after another and send their results."""
    for number, kill in kills:
        results.send(matrix.run_killed(number, kill))
