"""A build task or a merge that is killed at any durable operation and run again makes the same corpus."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from drills.kill_matrix.durable_operations import Kill, Operation
from support.folder_contents import finished_files
from support.killed_forks import operations_of, run_killed

from electra_dist.corpus.builder.build_corpus import Part, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts, take_joined
from electra_dist.data.manifest import MANIFEST_KEY

NUM_SAMPLED = 12  # kills of the default tests in each phase


class Build:
    """Small corpus build by two tasks: the expected corpus, and copies of the output folder before each command.

    A phase is one of the two commands that are killed: "part" (the second task) or "merge".
    """

    def __init__(self, request: BuildRequest, folder: Path) -> None:
        """Build the corpus in one process, for comparison, and once more by two tasks."""
        self.request = request
        self.output = Path(request.output)
        build_corpus(dataclasses.replace(request, output=str(folder / "whole")))
        self.expected = finished_files(folder / "whole")
        self.before: dict[str, Path] = {}
        build_part(request, Part(1, 2))
        self.before["part"] = Path(shutil.copytree(self.output, folder / "before-part"))
        build_part(request, Part(2, 2))
        self.before["merge"] = Path(shutil.copytree(self.output, folder / "before-merge"))

    def restore(self, phase: str) -> None:
        """Replace the output folder by its copy from before a phase, "part" or "merge"."""
        shutil.rmtree(self.output, ignore_errors=True)
        shutil.copytree(self.before[phase], self.output)

    def run(self, phase: str) -> None:
        """Run a phase, "part" or "merge", in the way in which its command does."""
        if phase == "part":
            build_part(self.request, Part(2, 2))
        elif (self.output / MANIFEST_KEY).exists():
            take_joined(self.request.output, None)
        else:
            join_parts(self.request.output, None)


@pytest.fixture
def build(
    build_request: Callable[..., BuildRequest],
    prose: Callable[[int, int], list[str]],
    jsonl_file: Callable[..., Path],
    tmp_path: Path,
) -> Build:
    """Return a build of two input files, with held-out rows."""
    inputs = [jsonl_file(prose(30, number), f"{number}.jsonl") for number in range(2)]
    return Build(build_request(inputs, "parts", heldout_fraction=0.2), tmp_path)


def check_kills(build: Build, phase: str, choose: Callable[[Sequence[Kill]], Sequence[Kill]]) -> int:
    """Kill a phase at each chosen operation, run it again, and compare the corpus; return the number of kills."""
    build.restore(phase)
    operations: list[Operation] = operations_of(lambda: build.run(phase), build.output)
    kills = choose([Kill(operation, moment) for operation in operations for moment in operation.moments])
    for kill in kills:
        build.restore(phase)
        run_killed(lambda: build.run(phase), build.output, kill)
        build.run(phase)
        build.run("merge")
        assert finished_files(build.output) == build.expected, kill
    return len(kills)


@pytest.mark.parametrize("phase", ["part", "merge"])
def test_sampled_kills_of_a_part_and_of_a_merge_change_no_byte(build: Build, phase: str) -> None:
    assert check_kills(build, phase, lambda kills: kills[:: len(kills) // NUM_SAMPLED]) >= NUM_SAMPLED


@pytest.mark.drill
@pytest.mark.parametrize("phase", ["part", "merge"])
def test_no_kill_of_a_part_or_of_a_merge_changes_a_byte(build: Build, phase: str) -> None:
    num_kills = check_kills(build, phase, lambda kills: kills)
    print(f"{phase}: {num_kills} kills, 0 differences")
    assert num_kills > 2 * NUM_SAMPLED  # the sample is a fraction of them
