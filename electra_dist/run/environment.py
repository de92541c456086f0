"""What a run ran on: versions, CPU, memory, GPUs; saved as environment.json in the run folder at every start.

Guarantee: names and sizes only: no host name, user, path, address or environment variable, so that a report can be
handed on. Cost: some 50 ms with torch already imported.

Where it stops: this node; others are taken to be like it.
"""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from electra_dist.nvml import GpuProbe
from electra_dist.run.folder import ENVIRONMENT_FILE
from electra_dist.store.files import replacing
from electra_dist.version import VERSION

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "triton", "numpy", "webdataset", "boto3")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the packages that compute; those not installed are left out."""
    found = {"electra-dist": VERSION, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | _cuda_versions()


def _cuda_versions() -> dict[str, str]:
    import torch  # seconds, unless training has it already

    if not torch.cuda.is_available():
        return {}
    nccl = torch.cuda.nccl.version()
    return {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl))}


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, cores in all, memory."""
    return {
        "model": _cpu_model(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The kernel's name of the processor; elsewhere than on Linux (and on some ARM) what Python knows."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> dict[str, Any]:
    """Driver and GPUs of this node; empty without one."""
    probe = GpuProbe.open()
    if probe is None:
        return {}
    samples, driver = probe.sample(), probe.driver_version()
    probe.close()
    return {
        "driver": driver,
        "devices": [{"name": gpu.name, "memory_gb": _rounded(gpu.memory_total_gb)} for gpu in samples],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def environment(world_size: int) -> dict[str, Any]:
    """All of it, JSON-able."""
    system = f"{platform.system()} {platform.machine()}"
    return {"versions": versions(), "cpu": cpu(), "gpus": gpus(), "system": system, "world_size": world_size}


def write_environment(run_dir: Path, world_size: int) -> Path:
    """Save `environment(world_size)` in the run folder, in place of that of the last start."""
    path = Path(run_dir) / ENVIRONMENT_FILE
    with replacing(path) as file:
        file.write(json.dumps(environment(world_size), indent=1).encode() + b"\n")
    return path


def read_environment(run_dir: Path) -> dict[str, Any]:
    """What `write_environment` saved; empty if it did not."""
    path = Path(run_dir) / ENVIRONMENT_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
