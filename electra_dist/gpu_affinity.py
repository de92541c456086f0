"""Tell which GPUs of its node a process may use, without the driver, and bind a rank to the CPU cores near its GPU.

Guarantee: `visible_devices` reads CUDA_VISIBLE_DEVICES as CUDA does. If the cores near the GPU are not known, or if
the process may use none of them, the process keeps all cores that it may use. Memory that the process writes to first
afterwards is on the same NUMA node, because the kernel allocates memory near the core that first writes to it.

How: the files by which the driver and the kernel describe GPUs are read, because a query of a faulty driver can hang.
They are in proc/, sys/ and dev/ below `root`, which tests replace. The module does not import torch.

Limits: GPUs are numbered by their PCI address, as CUDA numbers GPUs of one model. Whether a part of a GPU (MIG) exists
is not known, nor the cores near it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"  # environment variable


def visible_devices(environment: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the GPUs that CUDA shows to a process with these environment variables, in CUDA's order.

    A GPU is named by its number or UUID, a part of one (MIG) by "MIG-...". As in CUDA, the list ends before an invalid
    entry, is empty if a GPU is named twice, and has at most one MIG part. If the node's GPUs are not known, all are
    valid.
    """
    uuids = list(_gpus(root).values())
    if VISIBLE_DEVICES not in environment:
        return [str(number) for number in range(len(uuids))]
    entries = environment[VISIBLE_DEVICES].split(",")
    is_part = entries[0].strip().startswith("MIG-")
    is_uuid = entries[0].strip().startswith("GPU-")
    names: list[str] = []
    for entry in entries[:1] if is_part else entries:
        name = entry.strip()
        if is_uuid:
            name = _whole_uuid(name, uuids)
        elif not is_part:
            name = _device_number(name, uuids)
        if not name:
            break
        if name in names:
            return []
        names.append(name)
    return names


def num_gpus(root: Path = Path("/")) -> int:
    """Return how many NVIDIA GPUs this machine or container has, those that CUDA_VISIBLE_DEVICES hides included."""
    return len(_gpus(root))


def hides_all_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs: it is set, and empty or begins with a negative number."""
    return re.match(r"\s*(-\d|$)", environment.get(VISIBLE_DEVICES, "0")) is not None


def _whole_uuid(beginning: str, uuids: list[str]) -> str:
    """Complete the beginning of a GPU's UUID: "" if none or several match, unchanged if UUIDs are not known."""
    if not beginning.startswith("GPU-"):
        return ""
    if "" in uuids or not uuids:
        return beginning
    matching = [uuid for uuid in uuids if uuid.startswith(beginning)]
    return matching[0] if len(matching) == 1 else ""


def _device_number(entry: str, uuids: list[str]) -> str:
    """Return the number at the beginning of `entry`, as C's strtoul reads it; "" if no GPU has this number."""
    match = re.match(r"\+?(\d+)", entry)
    if match is None or (uuids and int(match[1]) >= len(uuids)):
        return ""
    return str(int(match[1]))


def bind_to_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int]:
    """Bind this process to the CPU cores near its GPU; return the numbers of the cores that it may use afterwards.

    Its GPU is number `local_rank` of `visible_devices`. Call it before threads are started: a thread keeps the cores
    that it was started with.
    """
    allowed = os.sched_getaffinity(0)
    near = cores_near_gpu(local_rank, environment, root) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)
    return frozenset(near or allowed)


def cores_near_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """Return the numbers of the CPU cores on the NUMA node of a rank's GPU; an empty set if they are not known."""
    names = visible_devices(environment, root)
    if local_rank >= len(names):
        return set()
    name = names[local_rank]
    addresses = [address for number, (address, uuid) in enumerate(_gpus(root).items()) if name in (str(number), uuid)]
    if not addresses:
        return set()
    (address,) = addresses
    return _parse_cores(_read(root / "sys/bus/pci/devices" / address.lower() / "local_cpulist"))


def _gpus(root: Path) -> dict[str, str]:
    """Return the NVIDIA GPUs that can be opened, as PCI address -> UUID ("" if not reported), in order of addresses.

    The driver lists all GPUs of the machine, but a container may have device files of only some. If the driver lists
    none, each device file /dev/nvidiaN counts as a GPU, and its path stands in place of the address.
    """
    uuid_of_address = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        information = _read(folder / "information")
        minor = re.search(r"Device Minor:\s*(\d+)", information)
        uuid = re.search(r"GPU UUID:\s*(\S+)", information)
        if minor is not None and (root / f"dev/nvidia{minor[1]}").exists():
            uuid_of_address[folder.name] = uuid[1] if uuid is not None else ""
    if uuid_of_address:
        return uuid_of_address
    # /dev also has files such as nvidiactl and nvidia-uvm, which are not GPUs.
    device_files = (root / "dev").glob("nvidia*")
    return {str(file): "" for file in device_files if re.fullmatch(r"nvidia\d+", file.name)}


def _parse_cores(text: str) -> set[int]:
    """Return the core numbers in a list such as "0-3,8"; an empty set if it is malformed."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
