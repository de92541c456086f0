"""Bind a rank to the cores of the NUMA node of its GPU, as the operating system lists them.

Guarantee: a rank keeps every core that it may use if the cores near its GPU are not known, or if none of them is among
those that it may use. Memory that the rank allocates afterwards is that of the same NUMA node, because the kernel
takes the memory near the core that first writes to it.

Cost: a few small files of /proc and /sys, once for each rank. Imports no torch.

Limits: GPUs are numbered by their PCI address, as CUDA numbers GPUs of one model. MIG devices are not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def bind_to_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int]:
    """Bind this process, and all that it starts, to the cores near its GPU; return the cores that it may use then.

    Call it before the process starts threads, because those that run already keep their cores.

    Args:
        local_rank: number of the rank on its node.
        environment: variables of the process, of which CUDA_VISIBLE_DEVICES is read.
        root: folder in which proc/, sys/ and dev/ are.
    """
    allowed = os.sched_getaffinity(0)
    near = cores_near_gpu(local_rank, environment, root) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)
    return frozenset(near or allowed)


def cores_near_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """Return the numbers of the cores of the NUMA node of a rank's GPU; an empty set if they are not known.

    The arguments are those of `bind_to_gpu`.
    """
    gpus = _gpus(root)
    addresses = list(gpus)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(len(gpus))]
    if local_rank >= len(names):
        return set()
    name = names[local_rank].strip()
    address = next((address for address, uuid in gpus.items() if name == uuid), "")
    if name.isdigit() and int(name) < len(addresses):
        address = addresses[int(name)]
    if not address:
        return set()
    return _parse_cores(_read(root / "sys/bus/pci/devices" / address.lower() / "local_cpulist"))


def _gpus(root: Path) -> dict[str, str]:
    """Return PCI address -> UUID of NVIDIA's GPUs that this container or machine may open, by PCI address."""
    gpus = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        information = _read(folder / "information")
        minor = re.search(r"Device Minor:\s*(\d+)", information)
        uuid = re.search(r"GPU UUID:\s*(\S+)", information)
        if minor is not None and (root / f"dev/nvidia{minor[1]}").exists():
            gpus[folder.name] = uuid[1] if uuid is not None else ""
    return gpus


def _parse_cores(text: str) -> set[int]:
    """Return the numbers in the kernel's list of cores, such as "0-3,8"; an empty set for another text."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _read(path: Path) -> str:
    """Return the text of a small file of the kernel without the line break at its end; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
