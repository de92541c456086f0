"""The exit code of the first rank that meets an error that ends the run, with two real ranks over gloo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.real_runs import free_port

RANKS = """
import sys, torch, torch.distributed as dist
from electra_dist.errors import StorageLost
from electra_dist.collectives import report_once, reported_exit_code
dist.init_process_group("gloo")
assert reported_exit_code() is None
dist.barrier()
if dist.get_rank() == 1:
    report_once(StorageLost("RUN/metrics.jsonl: disk full"), 75)
    report_once(StorageLost("a consequence"), 78)
    sys.exit(75)
try:
    dist.all_reduce(torch.zeros(1))
except RuntimeError:
    sys.exit(reported_exit_code())
"""


@pytest.mark.multiproc
def test_all_ranks_end_with_the_code_of_the_first_error_which_is_printed_once() -> None:
    """Rank 0 waits in a collective for rank 1, which has lost its storage."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS], env={**os.environ, **group, "RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [75, 75], outputs
    errors = [line for output in outputs for line in output.splitlines() if line.startswith("error: ")]
    assert errors == ["error: RUN/metrics.jsonl: disk full"]
