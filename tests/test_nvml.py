"""GPU samples, health and readings of a run against a fake driver; stragglers from step times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.analysis.stragglers import stragglers
from electra_dist.nvml import GpuHealth, GpuProbe, GpuSample
from electra_dist.train.health.gpu_monitor import GpuReading, GpuSampler, gone_bad

UNSUPPORTED = {key: "unsupported" for key in fake.HEALTHY if not key.endswith("_error")}


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuProbe]:
    """`probe(device, ...)`: an open probe of fake GPUs, each a dict of differences from a healthy one."""
    monkeypatch.setattr(nvml, "pynvml", fake)

    def connect(*devices: dict[str, Any]) -> GpuProbe:
        fake.configure(list(devices))
        opened = GpuProbe.open()
        assert opened is not None
        return opened

    return connect


def test_a_sample_of_a_gpu_that_tells_all_and_of_one_that_tells_little(probe: Callable[..., GpuProbe]):
    opened = probe({"throttle": 0x4 | 0x1 | 0x80}, {**UNSUPPORTED, "temperature": 40})
    whole, little = opened.sample()
    assert whole == GpuSample(
        uuid="GPU-0",
        name="NVIDIA H200",
        utilisation=0.97,
        memory_used_gb=61.0,
        memory_total_gb=150.754820096,
        power_w=651.5,
        sm_clock_mhz=1755,
        temperature_c=61,
        ecc_uncorrected=0,
        throttle=("power cap", "power brake"),
    )
    assert (little.name, little.temperature_c, little.throttle) == ("unknown GPU", 40, ())
    assert little.utilisation is little.memory_used_gb is little.power_w is little.ecc_uncorrected is None
    assert opened.driver_version() == "580.65"
    opened.close()
    assert fake.open_count == 0


def test_health_of_a_gpu_with_every_fault_and_of_one_that_tells_nothing(probe: Callable[..., GpuProbe]):
    faulty, silent = probe(
        {
            "ecc_aggregate": 7,
            "retired_pages": 3,
            "retirement_pending": 1,
            "remapped_rows": [5, 2, 1, 0],
            "recovery_action": 2,
            "nvlinks": [1, 0, 2],
        },
        UNSUPPORTED,
    ).health()
    assert (faulty.index, faulty.lost, faulty.now.uuid) == (0, "", "GPU-0")
    assert (faulty.ecc_aggregate, faulty.retired_pages, faulty.retirement_pending) == (7, 3, True)
    assert (faulty.remapped_rows, faulty.remap_pending, faulty.remap_failed) == (2, True, False)
    assert (faulty.recovery_action, faulty.nvlinks) == ("reboot the node", (True, False, True))
    assert (faulty.slowdown_c, faulty.max_sm_clock_mhz) == (87, 1980)
    assert silent == GpuHealth(
        index=1,
        lost="",
        now=silent.now,
        ecc_aggregate=None,
        retired_pages=None,
        retirement_pending=None,
        remapped_rows=None,
        remap_pending=None,
        remap_failed=None,
        recovery_action="",
        nvlinks=(),
        slowdown_c=None,
        max_sm_clock_mhz=None,
    )


def test_a_lost_gpu_is_reported_beside_those_that_answer_and_another_jobs_is_passed_over(
    probe: Callable[..., GpuProbe],
):
    found = probe(
        {},
        {"handle_error": fake.NVML_ERROR_GPU_IS_LOST},
        {"query_error": fake.NVML_ERROR_RESET_REQUIRED},
        {"handle_error": fake.NVML_ERROR_NO_PERMISSION},
    ).health()
    assert [(h.index, h.lost) for h in found] == [(0, ""), (1, "GPU is lost"), (2, "GPU requires reset")]
    assert found[1].now.temperature_c is found[2].now.temperature_c is None


def test_an_older_driver_and_library_are_asked_by_the_older_name(
    probe: Callable[..., GpuProbe], monkeypatch: pytest.MonkeyPatch
):
    opened = probe({"throttle": 0x40, "recovery_action": 1})
    monkeypatch.setattr(
        fake, "nvmlDeviceGetCurrentClocksThrottleReasons", fake.nvmlDeviceGetCurrentClocksEventReasons, raising=False
    )
    monkeypatch.delattr(fake, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(fake, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    (found,) = opened.health()
    assert found.now.throttle == ("hardware thermal slowdown",)
    assert found.recovery_action == ""


def test_no_library_no_driver_and_no_gpu_are_none_and_never_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "pynvml", fake)
    fake.configure(None)
    assert GpuProbe.open() is None
    fake.configure([])
    assert GpuProbe.open() is None
    assert fake.open_count == 0
    monkeypatch.setattr(nvml, "pynvml", None)
    sampler = GpuSampler()
    assert sampler.read() is None
    sampler.close()


def test_it_imports_where_nvidia_ml_py_is_not_installed_and_without_torch(tmp_path: Path):
    code = (
        "import sys; sys.modules['pynvml'] = None\n"  # as if not installed
        "from electra_dist.train.health.gpu_monitor import GpuSampler\n"
        "assert GpuSampler().read() is None; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_names_values_and_bits_are_those_of_the_real_library():
    import pynvml as real

    names = [name for name in vars(fake) if name.startswith(("nvml", "NVML_"))]
    assert len(names) > 30
    assert [name for name in names if not hasattr(real, name)] == []
    constants = [name for name in names if name.isupper()]
    assert {name: getattr(fake, name) for name in constants} == {name: getattr(real, name) for name in constants}
    assert {
        real.nvmlClocksEventReasonSwPowerCap: "power cap",
        real.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
        real.nvmlClocksEventReasonSwThermalSlowdown: "software thermal slowdown",
        real.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
        real.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    } == nvml._THROTTLE_BITS
    assert nvml._RECOVERY_ACTIONS == {
        real.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "reset the GPU",
        real.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "reboot the node",
        real.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "drain its peer-to-peer traffic",
        real.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "drain and reset the GPU",
        real.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "recover the IMEX domain",
        real.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "reset its bus",
        real.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "reboot the system",
    }


def test_a_reading_of_a_run_is_of_the_worst_gpu_and_one_sick_device_shows(probe: Callable[..., GpuProbe]):
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


def test_a_reading_of_gpus_that_tell_nothing_is_unknown_not_zero(probe: Callable[..., GpuProbe]):
    probe(UNSUPPORTED).close()
    found = GpuSampler().read()
    assert found == GpuReading(
        gpu_temperature_c=None,
        gpu_power_w=None,
        gpu_sm_clock_mhz=None,
        gpu_memory_used_gb=None,
        gpu_ecc_uncorrected=None,
        gpu_throttle=(),
    )


def test_only_new_memory_errors_make_a_node_go_bad_in_the_middle_of_a_run(probe: Callable[..., GpuProbe]):
    def reading(**device: Any) -> GpuReading | None:
        probe(device).close()
        return GpuSampler().read()

    first = reading(ecc_volatile=2)
    assert gone_bad(first, reading(ecc_volatile=2, temperature=95, throttle=0x40)) == ""
    assert gone_bad(first, reading(ecc_volatile=5)) == "3 uncorrected memory errors since the run started"
    assert gone_bad(first, reading(**UNSUPPORTED)) == gone_bad(None, first) == gone_bad(first, None) == ""


def test_a_rank_is_a_straggler_only_if_it_was_slow_at_every_one_of_the_last_looks():
    even = [1.0, 1.0, 1.01, 0.99]
    slow_2 = [1.0, 1.0, 1.3, 0.99]
    slow_both = [1.0, 1.5, 1.3, 0.99]
    assert stragglers([even, slow_2, slow_2, slow_2]) == [2]
    assert stragglers([slow_2, slow_2, even, slow_2]) == []
    assert stragglers([slow_2, slow_2]) == []
    assert stragglers([slow_both] * 3, factor=1.1) == [1, 2]
    assert stragglers([slow_2, slow_both], factor=1.1, in_a_row=2) == [2]
    assert stragglers([slow_2] * 3, factor=1.31) == []


def test_two_ranks_can_be_told_apart_below_a_factor_of_two():
    assert stragglers([[1.0, 2.0]] * 3, factor=1.2) == [1]
    assert stragglers([[1.0]] * 3) == []
