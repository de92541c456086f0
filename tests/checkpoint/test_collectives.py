"""Check the number and the bytes of the collectives in a start, a save and a restore of 64, 512 and 1,024 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "collectives_worker.py"
TESTS = Path(__file__).resolve().parents[1]

Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def counts_of_sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    """Number of ranks -> counts of collectives after each phase, as `collectives_worker.measure` returns them."""
    command = [sys.executable, str(WORKER), str(tmp_path_factory.mktemp("ranks")), "64", "512", "1024"]
    search_path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search_path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    counts: dict[str, Counts] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.parametrize("num_ranks", [64, 512, 1024])
def test_a_start_and_a_restore_take_six_small_collectives_and_a_save_none(
    counts_of_sizes: dict[str, Counts], num_ranks: int
) -> None:
    counts = counts_of_sizes[str(num_ranks)]
    num_bytes = counts["restore"].pop("bytes")
    assert counts["start"]["broadcast"] == 2  # the length of the message, then the message
    assert counts["save"] == counts["start"]
    # The list of checkpoints from rank 0, then what each rank has found: sizes and values.
    assert counts["restore"] == {"broadcast": 4, "all_gather": 2}
    assert num_bytes < 1000
