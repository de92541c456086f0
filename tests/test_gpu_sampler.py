"""GPU readings of a run with a fake driver, and the faults for which a node is given up during a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_gpus import UNSUPPORTED, fake_probes
from support.fake_nvml import pynvml as fake

from electra_dist.nvml import GpuProbe, GpuReading, GpuSampler


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuProbe]:
    """A function that opens a probe of fake GPUs, each given as a dict of differences from a healthy one."""
    return fake_probes(monkeypatch)


@pytest.mark.real_start
def test_the_module_imports_without_nvidia_ml_py_and_without_torch(tmp_path: Path):
    code = (
        "import sys; sys.modules['pynvml'] = None\n"  # as if not installed
        "from electra_dist.nvml import GpuSampler\n"
        "assert GpuSampler.open() is None; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_reading_has_the_worst_value_of_all_gpus_and_the_sum_of_power_and_errors(probe: Callable[..., GpuProbe]):
    probe(
        {"ecc_volatile": 1, "sm_clock": 1980},
        {"temperature": 88, "sm_clock": 345, "throttle": 0x48, "memory_used": 70_000_000_000},
        {"ecc_volatile": 2, "power_mw": "unsupported", "throttle": 0x40},
    ).close()
    sampler = GpuSampler.open()
    assert sampler is not None
    assert sampler.read() == GpuReading(
        gpu_temperature_c=88,
        gpu_power_w=1303.0,
        gpu_sm_clock_mhz=345,
        gpu_memory_used_gb=70.0,
        gpu_ecc_uncorrected=3,
        gpu_throttle=("hardware slowdown", "hardware thermal slowdown"),
    )
    sampler.close()
    assert fake.open_count == 0


def test_a_reading_of_gpus_that_answer_no_query_is_none_rather_than_zero(probe: Callable[..., GpuProbe]):
    reading = GpuSampler(probe(UNSUPPORTED)).read()
    assert reading == GpuReading(
        gpu_temperature_c=None,
        gpu_power_w=None,
        gpu_sm_clock_mhz=None,
        gpu_memory_used_gb=None,
        gpu_ecc_uncorrected=None,
        gpu_throttle=(),
    )


class FakeDriver:
    """A sampler over fake GPUs, each given as a dict of differences from a healthy one."""

    def __init__(self, probe: Callable[..., GpuProbe], *gpus: dict[str, Any]) -> None:
        self._probe = probe
        self._sampler = GpuSampler(probe(*gpus))
        assert self.fault_with(*gpus) == ""

    def fault_with(self, *gpus: dict[str, Any]) -> str:
        """Return the fault that the sampler finds once the GPUs have these differences."""
        self._sampler._probe = self._probe(*gpus)
        self._sampler.read()
        return self._sampler.fault


def test_errors_of_a_gpu_of_another_job_on_the_node_are_not_read(
    probe: Callable[..., GpuProbe], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert FakeDriver(probe, {}, {}).fault_with({}, {"ecc_volatile": 9}) == ""


def test_only_new_memory_errors_make_a_node_unhealthy_during_a_run(probe: Callable[..., GpuProbe]):
    driver = FakeDriver(probe, {"ecc_volatile": 2})
    assert driver.fault_with({"ecc_volatile": 2, "temperature": 95, "throttle": 0x40}) == ""
    assert driver.fault_with(UNSUPPORTED) == ""
    assert driver.fault_with({"ecc_volatile": 5}) == "3 uncorrected memory errors since the run started"


def test_old_errors_of_a_gpu_that_could_not_be_read_at_the_start_are_not_new(probe: Callable[..., GpuProbe]):
    driver = FakeDriver(probe, {}, {"ecc_volatile": "unsupported"})
    assert driver.fault_with({}, {"ecc_volatile": 4}) == ""
    assert driver.fault_with({}, {"ecc_volatile": 5}) == "1 uncorrected memory errors since the run started"


def test_a_gpu_that_is_lost_does_not_hide_new_errors_of_another(probe: Callable[..., GpuProbe]):
    driver = FakeDriver(probe, {"ecc_volatile": 7}, {"ecc_volatile": 1})
    lost_and_bad = (UNSUPPORTED, {"ecc_volatile": 3})
    assert driver.fault_with(*lost_and_bad) == "2 uncorrected memory errors since the run started"
