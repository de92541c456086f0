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

from electra_dist.nvml import GpuProbe
from electra_dist.train.health.gpu_monitor import GpuReading, GpuSampler, gone_bad


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuProbe]:
    """A function that opens a probe of fake GPUs, each given as a dict of differences from a healthy one."""
    return fake_probes(monkeypatch)


@pytest.mark.real_start
def test_the_module_imports_without_nvidia_ml_py_and_without_torch(tmp_path: Path):
    code = (
        "import sys; sys.modules['pynvml'] = None\n"  # as if not installed
        "from electra_dist.train.health.gpu_monitor import GpuSampler\n"
        "assert GpuSampler().read() is None; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_reading_has_the_worst_value_of_all_gpus_and_the_sum_of_power_and_errors(probe: Callable[..., GpuProbe]):
    probe(
        {"ecc_volatile": 1, "sm_clock": 1980},
        {"temperature": 88, "sm_clock": 345, "throttle": 0x48, "memory_used": 70_000_000_000},
        {"ecc_volatile": 2, "power_mw": "unsupported", "throttle": 0x40},
    ).close()
    sampler = GpuSampler()
    assert sampler.read() == GpuReading(
        gpu_temperature_c=88,
        gpu_power_w=1303.0,
        gpu_sm_clock_mhz=345,
        gpu_memory_used_gb=70.0,
        gpu_ecc_uncorrected=3,
        gpu_throttle=("hardware slowdown", "hardware thermal slowdown"),
    )
    sampler.close()
    sampler.close()
    assert fake.open_count == 0
    assert sampler.read() is None


def test_a_reading_of_gpus_that_answer_no_query_is_none_rather_than_zero(probe: Callable[..., GpuProbe]):
    probe(UNSUPPORTED).close()
    reading = GpuSampler().read()
    assert reading == GpuReading(
        gpu_temperature_c=None,
        gpu_power_w=None,
        gpu_sm_clock_mhz=None,
        gpu_memory_used_gb=None,
        gpu_ecc_uncorrected=None,
        gpu_throttle=(),
    )


def test_errors_of_a_gpu_of_another_job_on_the_node_are_not_read(
    probe: Callable[..., GpuProbe], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    probe({}, {}).close()
    first = GpuSampler().read()
    probe({}, {"ecc_volatile": 9}).close()
    assert gone_bad(first, GpuSampler().read()) == ""


def test_only_new_memory_errors_make_a_node_unhealthy_during_a_run(probe: Callable[..., GpuProbe]):
    def reading(**device: Any) -> GpuReading | None:
        """Return the reading of one GPU with these differences from a healthy one."""
        probe(device).close()
        return GpuSampler().read()

    first = reading(ecc_volatile=2)
    assert gone_bad(first, reading(ecc_volatile=2, temperature=95, throttle=0x40)) == ""
    assert gone_bad(first, reading(ecc_volatile=5)) == "3 uncorrected memory errors since the run started"
    assert gone_bad(first, reading(**UNSUPPORTED)) == gone_bad(None, first) == gone_bad(first, None) == ""
