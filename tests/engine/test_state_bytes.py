"""The plan's bytes per parameter are those that DeepSpeed really holds, on two ranks, through our engine.

Only the default stage here, because each needs two fresh processes; test_plan.py holds the others as measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_runs import free_port

from electra_dist.engine.state_layout import PARTS, state_layout

WORKER = Path(__file__).parent / "state_bytes_worker.py"
STAGE = 1


@pytest.mark.multiproc
def test_state_per_gpu_in_bf16_on_two_ranks():
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), str(STAGE)],
                env={**os.environ, **place, **address, "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    output = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], output[0][-3000:] + output[1][-3000:]
    [line] = [line for line in output[0].splitlines() if line.startswith("MEASURED")]
    layout = state_layout("bf16", STAGE, offload_optimizer=False)
    predicted = sum(layout.bytes_per_gpu(part, 1, 2) for part in PARTS)
    assert float(line.split()[1]) == pytest.approx(predicted, abs=0.05)
