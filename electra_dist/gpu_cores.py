"""Bind the process of a rank to the CPU cores of the NUMA node to which its GPU is attached.

Guarantee: if the cores near the GPU are not known, or if the process may use none of them, the process keeps all cores
that it may use. Memory that the process writes to first afterwards is on the same NUMA node, because the kernel
allocates memory near the core that first writes to it.

Cost: a few small files in /proc and /sys are read, once for each rank. The module does not import torch.

Limits: GPUs are numbered by their PCI address, as CUDA numbers GPUs of one model. MIG devices are not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def bind_to_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int]:
    """Bind this process to the cores near its GPU; threads and processes that it starts afterwards inherit this.

    Call it before the process starts threads, because threads that run already keep their cores. Nothing is changed if
    the cores near the GPU are not known, or if the process may use none of them.

    Args:
        local_rank: number of the rank on its node, which selects the GPU.
        environment: environment variables of the process; CUDA_VISIBLE_DEVICES is read.
        root: folder that contains proc/, sys/ and dev/; tests pass another one than /.

    Returns:
        The numbers of the cores that the process may use afterwards.
    """
    allowed = os.sched_getaffinity(0)
    near = cores_near_gpu(local_rank, environment, root) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)
    return frozenset(near or allowed)


def cores_near_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """Return the numbers of the CPU cores of the NUMA node to which a rank's GPU is attached.

    The GPU is the one that CUDA would give to the rank: number `local_rank` of CUDA_VISIBLE_DEVICES, or of all GPUs if
    that variable is not set.

    Args:
        local_rank: number of the rank on its node.
        environment: environment variables of the process.
        root: folder that contains proc/, sys/ and dev/.

    Returns:
        The numbers of the cores; an empty set if the GPU or its cores are not known.
    """
    uuid_of_address = _visible_gpus(root)
    addresses = list(uuid_of_address)
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [str(number) for number in range(len(addresses))]  # each is the number or the UUID of a GPU
    if visible_devices:
        names = visible_devices.split(",")
    if local_rank >= len(names):
        return set()
    name = names[local_rank].strip()
    address = next((address for address, uuid in uuid_of_address.items() if name == uuid), "")
    if name.isdigit() and int(name) < len(addresses):
        address = addresses[int(name)]
    if not address:
        return set()
    return _parse_cores(_read(root / "sys/bus/pci/devices" / address.lower() / "local_cpulist"))


def _visible_gpus(root: Path) -> dict[str, str]:
    """Return the NVIDIA GPUs that this machine or container can open, as PCI address -> UUID, in order of addresses.

    The driver lists the GPUs of the whole machine. A GPU is left out if its device file is missing, as in a container
    that has been given only some of the GPUs. The UUID is "" if the driver does not report one.
    """
    uuid_of_address = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        information = _read(folder / "information")
        minor = re.search(r"Device Minor:\s*(\d+)", information)
        uuid = re.search(r"GPU UUID:\s*(\S+)", information)
        if minor is not None and (root / f"dev/nvidia{minor[1]}").exists():
            uuid_of_address[folder.name] = uuid[1] if uuid is not None else ""
    return uuid_of_address


def _parse_cores(text: str) -> set[int]:
    """Return the core numbers in a list of the kernel's notation, such as "0-3,8"; an empty set if it is malformed."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _read(path: Path) -> str:
    """Return the content of a small file of the kernel without white space at its ends; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
