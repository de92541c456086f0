"""Check one node before a run: its GPUs, disks, storage and clock.

Guarantees: each finding names the node, the device and the next step. `check_node` imports no torch and needs no GPU.

Limits: what counts as a fault is defined in gpu_checks.py and storage_checks.py. Checks that need several ranks or a
GPU under load are in rank_comparison.py.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.errors import EXIT_STOPPED, EXIT_UNHEALTHY
from electra_dist.nvml import GpuProbe
from electra_dist.run.failures import Strike, add_strike
from electra_dist.run.this_node import node_name
from electra_dist.store.patience import Patience
from electra_launcher.preflight.findings import Finding
from electra_launcher.preflight.gpu_checks import classify_gpus
from electra_launcher.preflight.storage_checks import check_storage

_POLL_S = 0.5  # between two calls of `give_up` while the preflight process runs


def check_node(config: Config, node: str, patience: Patience | None = None) -> list[Finding]:
    """Check this node's GPUs, storage, disks and clock, which needs neither torch nor other nodes.

    Test objects that are written to the storage are deleted again. If storage is full or does not respond, a new run
    waits for it as long as `patience` says (None: not at all). Raises StoreError if the run has several nodes and this
    node has no folder in which it could cache shards.
    """
    return check_gpus(node) + check_storage(config, node, patience)


def check_gpus(node: str) -> list[Finding]:
    """Return what NVML shows about this node's idle GPUs.

    If there is no GPU, or nvidia-ml-py is missing, the result is a single finding of severity "ok".
    """
    probe = GpuProbe.open()
    if probe is None:
        what = "no GPU to check: NVML finds none, or nvidia-ml-py is not installed"
        return [Finding(severity="ok", node=node, what=what)]
    try:
        return classify_gpus(probe.health(), node)
    finally:
        probe.close()


def preflight(
    run_dir: Path, arguments: Sequence[str], limit_s: float, give_up: Callable[[], bool] = lambda: False
) -> int:
    """Run `electra_launcher.preflight` as a separate process and return its exit code; 0 means that the node is fit.

    After `limit_s` seconds the process is killed, a strike (recorded fault of this node) is written, and the result is
    EXIT_UNHEALTHY. The end of the process is not awaited, because a hung driver may keep it alive. `give_up` is polled
    twice per second; once it returns True, the process is killed, and the result is EXIT_STOPPED.
    """
    process = subprocess.Popen([sys.executable, "-m", "electra_launcher.preflight", *arguments])
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_POLL_S, limit_s))
        if give_up():
            process.kill()
            return EXIT_STOPPED
    process.kill()
    reason = f"the preflight checks were not over within {limit_s:.0f} s; look for a hung GPU driver or mount"
    strike = Strike(time=time.time(), node=node_name(), device="", reason=reason, by="preflight")
    add_strike(run_dir, strike)
    return EXIT_UNHEALTHY
