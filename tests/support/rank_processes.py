"""Starts the ranks of a worker script on this machine without a launcher, and returns what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.real_runs import free_port

TIMEOUT_S = 600


def start_ranks(script: Path, num_ranks: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start `num_ranks` processes of a Python script, with the environment that init_distributed reads."""
    port = str(free_port())
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks), "PYTHONPATH": path}
    processes = []
    for rank in range(num_ranks):
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def finish_ranks(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait until all ranks have ended with exit code 0; return what each has printed."""
    output = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), output[0][-3000:]
    return output
