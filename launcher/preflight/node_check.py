"""Whether this node is fit for a run, before the run: GPUs, disks, storage, clock.

Guarantees: one line per finding, with the node, the device and the next step. `check_node` imports no torch and needs
no GPU.

Where it stops: see gpu_checks, disk_checks, storage_checks and rank_checks, which decide.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.errors import EXIT_UNHEALTHY
from electra_dist.nvml import GpuProbe
from electra_dist.run.strikes import Strike, add_strike, node_name
from launcher.preflight.findings import Finding
from launcher.preflight.gpu_checks import classify_gpus
from launcher.preflight.storage_checks import check_storage


def check_node(config: Config, node: str) -> list[Finding]:
    """What can be found without torch and without other nodes, GPUs first."""
    return check_gpus(node) + check_storage(config, node)


def check_gpus(node: str) -> list[Finding]:
    """The GPUs at rest; one line where there are none."""
    probe = GpuProbe.open()
    if probe is None:
        return [Finding(severity="ok", node=node, what="no GPU that NVML knows of (or no nvidia-ml-py): not checked")]
    try:
        return classify_gpus(probe.health(), node)
    finally:
        probe.close()


def preflight(run_dir: Path, arguments: Sequence[str], limit_s: float) -> int:
    """This check as a process of its own; its exit code. One that is not over within `limit_s` seconds hangs in a
    driver, where nothing may be able to end it: it is left behind, and the node gets its strike here."""
    process = subprocess.Popen([sys.executable, "-m", "launcher.preflight", *arguments])
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        reason = f"the checks before the start were not over within {limit_s:.0f} s"
        add_strike(run_dir, Strike(time=time.time(), node=node_name(), device="", reason=reason, by="preflight"))
        return EXIT_UNHEALTHY
