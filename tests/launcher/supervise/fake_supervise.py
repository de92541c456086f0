"""Runs launcher.supervise with fake_rank.py in place of the training.

With `--without-deepspeed` as the first argument, this script starts the ranks instead of DeepSpeed's launchers, in a
tenth of the time, for tests that do not depend on DeepSpeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launcher.lasting_output import outlive_the_reader
from launcher.supervise import __main__ as supervise
from launcher.supervise import wait_for_ranks
from launcher.supervise.rank_placement import Placement

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
COMMAND = Placement.command


def with_fake_ranks(self: Placement, state: Path, port: int, arguments: list[str]) -> list[str]:
    """Return the command of Placement.command with fake ranks in place of the training module."""
    command = COMMAND(self, state, port, arguments)
    at = command.index("--module")
    if DEEPSPEED:
        return [*command[:at], str(FAKE_RANK), *command[at + 2 :]]
    ranks = [str(rank) for rank in self.ranks]
    num_ranks = str(sum(self.slots))
    return [sys.executable, __file__, "ranks", ",".join(ranks), num_ranks, *command[at + 2 :]]


def start_ranks(ranks: list[str], num_ranks: str, arguments: list[str]) -> None:
    """Start the given ranks of a run of `num_ranks`, and wait for all of them to end."""
    command = [sys.executable, str(FAKE_RANK), *arguments]
    started = [subprocess.Popen(command, env={**os.environ, "RANK": rank, "WORLD_SIZE": num_ranks}) for rank in ranks]
    for process in started:
        process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        start_ranks(sys.argv[2].split(","), sys.argv[3], sys.argv[4:])
        sys.exit(0)  # the supervisor does not rely on the exit code of a launcher
    outlive_the_reader()
    DEEPSPEED = sys.argv[1] != "--without-deepspeed"
    wait_for_ranks._LEAVE_S = 3.0
    Placement.command = with_fake_ranks  # type: ignore[method-assign]
    sys.exit(supervise.main(sys.argv[1 if DEEPSPEED else 2 :]))
