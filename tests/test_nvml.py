"""Samples and health of GPUs against a fake driver, and the fake against the real library's names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fake_gpus import UNSUPPORTED, fake_probes
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.nvml import GpuHealth, GpuProbe, GpuSample, GpuSampler


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuProbe]:
    """`probe(device, ...)`: an open probe of fake GPUs, each a dict of differences from a healthy one."""
    return fake_probes(monkeypatch)


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


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [0, 2]),
        ("GPU-2", [2]),
        ("GPU-1,GPU-0", [0, 1]),
        ("GPU-gone,GPU-0", [0]),
        ("1,-1,2", [1]),  # CUDA ends the list at a name that it does not know
        ("MIG-GPU-2/1/0", [2]),
        ("MIG-of-1", [1]),
        ("NoDevFiles", []),  # Slurm's value for a job without GPUs
        ("", []),
    ],
)
def test_gpus_that_cuda_hides_are_another_jobs_and_are_left_out(
    probe: Callable[..., GpuProbe], monkeypatch: pytest.MonkeyPatch, names: str | None, shown: list[int]
):
    probe({}, {}, {}).close()
    if names is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    opened = GpuProbe.open()
    assert [health.index for health in opened.health()] == shown if opened else shown == []


@pytest.mark.parametrize(("names", "shown"), [("GPU-0", [0]), ("GPU-0,GPU-1", [0, 1]), ("1", [1])])
def test_a_lost_gpu_is_this_jobs_if_one_of_its_gpus_is_missing(
    probe: Callable[..., GpuProbe], monkeypatch: pytest.MonkeyPatch, names: str, shown: list[int]
):
    probe({}, {"handle_error": fake.NVML_ERROR_GPU_IS_LOST}).close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    opened = GpuProbe.open()
    assert opened is not None
    assert [health.index for health in opened.health()] == shown


def test_a_name_that_is_no_utf8_is_unknown(probe: Callable[..., GpuProbe], monkeypatch: pytest.MonkeyPatch):
    opened = probe({})
    monkeypatch.setattr(fake, "nvmlDeviceGetName", lambda device: b"\xff".decode())
    assert opened.sample()[0].name == "unknown GPU"
    monkeypatch.setattr(fake, "nvmlDeviceGetName", lambda device: b"H\xff")
    assert opened.sample()[0].name == "H\N{REPLACEMENT CHARACTER}"


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
    assert GpuSampler.open() is None


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
