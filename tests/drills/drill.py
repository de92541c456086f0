"""What the drills share: runs of a tiny model, their undisturbed twins, the comparison of both, and verdicts.

A drill is a table of faults and the code that makes them. A drill imports this module first: that lets it find the
project, and its runs use the CPU with one thread.

`Drill` makes runs on one corpus. `Drill.twin` is the same run without faults, and `first_difference` compares each
step of both bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support import forked_popen
from support.real_runs import read_losses, started, step_records, write_corpus, write_tiny_config
from support.s3_server import make_bucket, running_s3

LIMIT_S = 1800.0  # of one start of a run, also on a busy machine


class Verdict(NamedTuple):
    """Result of one check of a drill: one line of its table."""

    name: str
    good: bool
    detail: str


@dataclass(frozen=True)
class Run:
    """A run of a drill: its config file, its folder and its number of ranks."""

    config: Path
    folder: Path
    ranks: int

    @property
    def output(self) -> Path:
        """File beside the folder to which the drill appends what the ranks print."""
        return self.config.with_suffix(".log")

    def steps(self) -> list[tuple]:
        """Return the losses, norms and receipt of every recorded step, which an equal run repeats bit for bit."""
        receipts = [record["receipt"] for record in step_records(self.folder)]
        return [(*losses, receipt) for losses, receipt in zip(read_losses(self.folder), receipts, strict=True)]

    def train(self, code: int = 0) -> str:
        """Start the run as a user does, wait for its end, which must have this exit code, and return its output."""
        num_earlier = self.output.stat().st_size if self.output.exists() else 0
        with started(self.config, self.ranks, self.output) as process:
            found = process.wait(LIMIT_S)
        output = self.output.read_bytes()[num_earlier:].decode(errors="replace")
        assert found == code, f"{self.folder}: exit {found}\n{output[-6000:]}"
        return output


class Drill:
    """The runs of a drill, which have one corpus and some settings in common."""

    def __init__(
        self, folder: Path, rows_per_shard: list[int], heldout: Sequence[int] = (), **settings: object
    ) -> None:
        """Write the corpus; `heldout` has the rows of each shard for evaluations, which are left out without it."""
        self.folder = folder
        self._rows_per_shard, self._heldout = rows_per_shard, list(heldout)
        self._settings = settings if heldout else {"data.heldout": None, **settings}
        self._twins: dict[str, Run] = {}
        self._write_corpus(str(folder), None)

    def _write_corpus(self, place: str, endpoint_url: str | None) -> None:
        write_corpus(f"{place}/corpus", self._rows_per_shard, endpoint_url=endpoint_url)
        if self._heldout:
            write_corpus(f"{place}/corpus/heldout", self._heldout, seed=3, endpoint_url=endpoint_url)

    def new_run(self, name: str, ranks: int = 2, **settings: object) -> Run:
        """Write the config of a run, whose folder is named after `name`; `settings` go before those of all runs."""
        folder = self.folder / re.sub(r"\W+", "-", name).strip("-")
        config = folder.with_suffix(".yaml")
        write_tiny_config(config, folder, f"{self.folder}/corpus", **{**self._settings, **settings})
        return Run(config, folder, ranks)

    def twin(self, ranks: int = 2, **settings: object) -> Run:
        """Return the undisturbed run with these settings, which the first call makes.

        Another number of ranks adds up the same losses in another order, so their last bits differ.
        """
        key = f"{ranks} {settings}"
        if key not in self._twins:
            run = self.new_run(f"undisturbed {len(self._twins)}", ranks, **settings)
            run.train()
            self._twins[key] = run
        return self._twins[key]

    @contextlib.contextmanager
    def on_s3(self, kind: str | None = None) -> Iterator[tuple[str, str]]:
        """Run an S3 server that holds the corpus; yield its endpoint URL and the URL of a bucket.

        Its credentials are put into the environment. `kind` is `moto` or `radosgw`; None: the latter if installed.
        """
        with running_s3(kind) as server:
            os.environ.update(server.env)
            bucket = make_bucket(server.endpoint_url, server.env, "drill")
            self._write_corpus(bucket, server.endpoint_url)
            yield server.endpoint_url, bucket

    def s3_settings(self, bucket: str, endpoint_url: str, name: str) -> dict[str, object]:
        """Return the settings of a run with corpus and checkpoints in a bucket; `name` is that of its checkpoints."""
        settings: dict[str, object] = {
            "data.corpus": f"{bucket}/corpus",
            "data.endpoint_url": endpoint_url,
            "checkpoint.endpoint_url": endpoint_url,
            "checkpoint.targets": [f"{bucket}/{re.sub(r'[^a-z0-9]+', '-', name.lower())}"],
        }
        return settings | ({"data.heldout": f"{bucket}/corpus/heldout"} if self._heldout else {})


def first_difference(found: Sequence[tuple], expected: Sequence[tuple]) -> str:
    """Describe the first difference between the steps of two runs; "" if they are equal and there are any."""
    for found_step, expected_step in zip(found, expected):
        if found_step != expected_step:
            return f"step {expected_step[0]}: {found_step} is not {expected_step}"
    if len(found) != len(expected) or not expected:
        return f"{len(found)} steps, not {len(expected)}"
    return ""


def command(name: str, *arguments: object) -> list[str]:
    """Return a command of this project's environment, such as `electra-dist`."""
    return [str(Path(sys.executable).parent / name), *map(str, arguments)]


def start_programs_quickly(stack: contextlib.ExitStack) -> None:
    """Let Python programs that the drill starts be forks of a server that has imported everything, for one drill."""
    if forked_popen.ADDRESS_VARIABLE not in os.environ:  # a drill that a test has started uses the server of the tests
        stack.enter_context(forked_popen.address_of_server())
    forked_popen.ForkedPopen.names = None  # also in a drill that is a fork itself, whose threads would be in the way
    subprocess.Popen = forked_popen.ForkedPopen  # type: ignore[misc]


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a drill's command line; `description` is the docstring of the drill."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def at_least_one(text: str) -> int:
    """Return the number of an option that must not be 0, for `type=` of the parser."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def chosen(parser: argparse.ArgumentParser, option: str, words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the names that are words or, if none is, that contain one; all names if there are no words."""
    for word in words:
        if not any(word in name for name in names):
            parser.error(f"{option}: {word!r} is in the name of no case; the cases are {'; '.join(names)}")
    return [name for name in names if name in words] or [
        name for name in names if not words or any(word in name for word in words)
    ]


def judge(title: str, cases: Mapping[str, Callable[[], tuple[bool, str]]]) -> int:
    """Make the cases one after another, print their table, and return the exit code of the drill.

    A case returns whether it was good, and a line that says what it has found.
    """
    begin = time.monotonic()
    verdicts = []
    for name, case in cases.items():
        case_begin = time.monotonic()
        good, detail = case()
        verdicts.append(Verdict(name, good, detail))
        print(f"{name}: {'good' if good else 'BAD'} ({time.monotonic() - case_begin:.0f} s)", flush=True)
    return print_verdicts(f"{title}, {time.monotonic() - begin:.0f} s", verdicts)


def print_verdicts(title: str, verdicts: Sequence[Verdict]) -> int:
    """Print a drill's table and return its exit code: 0 if there are verdicts and all are good, otherwise 1."""
    print(f"\n{title}")
    for verdict in verdicts:
        print(f"{'good' if verdict.good else 'BAD':4}  {verdict.name:32}  {verdict.detail}")
    good = sum(verdict.good for verdict in verdicts)
    print(f"{good} good, {len(verdicts) - good} bad")
    return 0 if verdicts and good == len(verdicts) else 1
