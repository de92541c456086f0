"""The time limits that a rank sets for its own collectives, with two real ranks over gloo, and slow ranks.

A look is one gathering of the step times of all ranks, in seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.real_runs import free_port
from support.torch_versions import IS_2_8

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.store.patience import Patience
from electra_dist.train.monitor import RankMonitor, stragglers

COLLECTIVES = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from electra_dist.config import ClusterConfig
from electra_dist.store.patience import Patience
from electra_dist.train.monitor import RankMonitor
dist.init_process_group("gloo")
limits = {"hang_step_floor_s": 1.0, "hang_checkpoint_s": 4.0, "hang_eval_s": 4.0, "hang_setup_s": 60.0}
cluster = ClusterConfig(**limits, storage_patience_s=0.0)
monitor, phase, rank = RankMonitor(Path(sys.argv[1]), cluster, Patience(0.0).reporter), sys.argv[2], dist.get_rank()
for step in range(9):
    monitor.beat("step", step)
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.02)
monitor.beat(phase, 9)
monitor.beat("step", 9)
begin = time.monotonic()
if rank == 1:
    time.sleep(60.0)
try:
    dist.all_reduce(torch.zeros(1))
except RuntimeError:
    print("gave up after", time.monotonic() - begin, flush=True)
    os._exit(1)
"""


@pytest.mark.skipif(IS_2_8, reason="gloo of torch 2.8 does not obey a new timeout")
@pytest.mark.parametrize(("phase", "limit_s"), [("step", 2.0), ("checkpoint", 8.0)])
def test_a_collective_fails_after_twice_the_limit_of_its_phase(tmp_path: Path, phase: str, limit_s: float) -> None:
    """A rank that waits alone ends by itself, as it must when the network is cut and there is no supervisor.

    Torch's own limit is 10 or 30 minutes. The limit of a checkpoint also applies to the first step after it, because
    other ranks may still be writing.
    """
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVES, str(tmp_path), phase],
            env={**os.environ, **group, "RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        waited_s = float(output.split()[-1])
        assert limit_s - 0.2 <= waited_s < limit_s + 3.0
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_only_a_save_without_progress_is_reported_as_a_wait_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow save renews the heartbeat for as long as it takes; a wait for storage counts from its beginning."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monitor = RankMonitor(tmp_path, ClusterConfig(), Patience(0.0).reporter)
    monitor.beat("checkpoint", 5)
    [first] = read_heartbeats(tmp_path)
    phases = []
    for silent_s in (1.0, 61.0, 1.0):
        monitor.waits_for_thread(silent_s, "the previous checkpoint", 60.0)
        [beat] = read_heartbeats(tmp_path)
        phases.append(beat.phase)
        assert beat.time > first.time
    assert phases == ["checkpoint", "storage", "checkpoint"]


def test_a_rank_is_a_straggler_only_if_it_was_slow_in_each_of_the_last_looks():
    """By default a rank must take more than 1.2 times the median in three looks. The slowest rank comes first."""
    no_rank_slow = [1.0, 1.0, 1.01, 0.99]
    rank_2_slow = [1.0, 1.0, 1.3, 0.99]
    ranks_1_and_2_slow = [1.0, 1.5, 1.3, 0.99]

    assert stragglers([no_rank_slow, rank_2_slow, rank_2_slow, rank_2_slow]) == [2]
    assert stragglers([rank_2_slow, rank_2_slow, no_rank_slow, rank_2_slow]) == []
    assert stragglers([rank_2_slow, rank_2_slow]) == [], "two looks are too few"
    assert stragglers([ranks_1_and_2_slow] * 3, factor=1.1) == [1, 2]
    assert stragglers([rank_2_slow, ranks_1_and_2_slow], factor=1.1, in_a_row=2) == [2]
    assert stragglers([rank_2_slow] * 3, factor=1.31) == []


def test_of_two_ranks_the_slower_is_a_straggler_if_the_factor_is_below_two():
    """The median of two ranks is their mean, so no rank can exceed twice the median. A single rank is never slow."""
    assert stragglers([[1.0, 2.0]] * 3, factor=1.2) == [1]
    assert stragglers([[1.0]] * 3) == []
