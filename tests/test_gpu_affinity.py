"""Check that ranks are bound to the CPU cores near their GPU, with files that describe a machine of four GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from electra_dist.gpu_affinity import cores_near_gpu, visible_devices

# PCI address -> minor number of the device file, cores near it. The minor numbers are not in the order of addresses.
GPUS = {
    "0000:07:00.0": (2, "0-1,4"),
    "0000:0F:00.0": (0, "0-1,4"),
    "0000:87:00.0": (1, "2-3"),
    "0000:C1:00.0": (3, ""),
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Folder with the files in /proc, /sys and /dev by which the kernel and NVIDIA's driver describe GPUS."""
    for address, (minor, cores) in GPUS.items():
        proc_folder = tmp_path / "proc/driver/nvidia/gpus" / address
        sys_folder = tmp_path / "sys/bus/pci/devices" / address.lower()
        proc_folder.mkdir(parents=True)
        (proc_folder / "information").write_text(
            f"Model: \t\t H100\nGPU UUID: \t GPU-{minor}abc\nDevice Minor: \t {minor}\n"
        )
        sys_folder.mkdir(parents=True)
        (sys_folder / "local_cpulist").write_text(cores + "\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{minor}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("local_rank", "visible", "cores"),
    [
        (0, None, {0, 1, 4}),
        (2, None, {2, 3}),
        (3, None, set()),  # The kernel lists no cores for it.
        (4, None, set()),  # There is no such GPU.
        (0, "2,3", {2, 3}),
        (1, "GPU-2abc,GPU-1abc", {2, 3}),
        (0, "MIG-1", set()),
        (1, "GPU-2,GPU-1", {2, 3}),  # beginnings of UUIDs
        (0, "2,9", {2, 3}),
        (1, "2,9", set()),  # The list ends before the number of no GPU.
        (0, "", set()),
    ],
)
def test_the_cores_of_a_rank_are_those_near_its_gpu(
    machine: Path, local_rank: int, visible: str | None, cores: set[int]
):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cores_near_gpu(local_rank, environment, machine) == cores


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("3,1", ["3", "1"]),
        (" 3 , +1", ["3", "1"]),
        ("1gpu2,2ampere", ["1", "2"]),  # as C's strtoul reads them
        ("2,4,0", ["2"]),
        ("2,-1,0", ["2"]),
        ("2,,0", ["2"]),
        ("-1", []),
        ("-1,0", []),
        ("", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("1,01", []),
        ("GPU-3abc,GPU-0", ["GPU-3abc", "GPU-0abc"]),
        ("GPU-3abc,GPU-9,GPU-0", ["GPU-3abc"]),
        ("GPU-", []),  # the beginning of four
        ("GPU-3,GPU-3abc", []),
        ("GPU-3,1", ["GPU-3abc"]),
        ("1,GPU-3", ["1"]),
        ("MIG-5f,MIG-6f", ["MIG-5f"]),  # a process sees one part only
        ("MIG-GPU-3abc/1/0", ["MIG-GPU-3abc/1/0"]),
    ],
)
def test_visible_devices_are_read_as_cuda_does(machine: Path, visible: str | None, names: list[str]):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(environment, machine) == names


@pytest.mark.parametrize(
    "visible", ["3,1", " 3 , +1", "1gpu2,2ampere", "2,-1,0", "-1", "", "NoDevFiles", "1,1", "GPU-3,GPU-0,1", "MIG-5f"]
)
def test_visible_devices_are_as_many_as_torch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str):
    """On a machine whose GPUs are not known, because torch parses the variable without looking at them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = visible_devices(os.environ, tmp_path)
    assert names == [str(device) for device in torch.cuda._parse_visible_devices()]


def test_a_gpu_that_the_container_may_not_open_is_not_counted(machine: Path):
    (machine / "dev/nvidia2").unlink()
    (machine / "dev/nvidia0").unlink()
    assert cores_near_gpu(0, {}, machine) == {2, 3}


def test_a_machine_without_gpus_has_no_such_cores(tmp_path: Path):
    assert cores_near_gpu(0, {}, tmp_path) == set()


def test_a_process_is_bound_to_these_cores_and_keeps_its_own_if_none_of_them_is_allowed(machine: Path):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("this process may use one core only, so there is nothing to bind")
    for address, cores in (("0000:07:00.0", str(allowed[0])), ("0000:0f:00.0", "9999")):
        (machine / "sys/bus/pci/devices" / address / "local_cpulist").write_text(cores + "\n")
    script = (
        "import os, pathlib, sys\nfrom electra_dist.gpu_affinity import bind_to_gpu\n"
        f"used = bind_to_gpu(int(sys.argv[1]), {{}}, pathlib.Path({str(machine)!r}))\n"
        "assert used == os.sched_getaffinity(0)\nprint(*sorted(used))\n"
    )
    for local_rank, expected in ((0, allowed[:1]), (1, allowed)):
        done = subprocess.run([sys.executable, "-c", script, str(local_rank)], capture_output=True, text=True)
        assert done.stdout.split() == [str(core) for core in expected], done.stderr
