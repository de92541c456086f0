"""GPU samples against a fake driver; the environment of this machine."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from electra_dist.telemetry import gpu, hardware
from electra_dist.telemetry.gpu import GpuProbe, GpuSample


class FakeNvml(types.SimpleNamespace):
    """The part of pynvml that we call, for GPUs that are dicts of answers; a missing answer is NotSupported."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0, 1, 0

    def __init__(self, devices: list[dict[str, Any]], driver: bool = True) -> None:
        super().__init__(devices=devices, driver=driver, open=0)

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.devices[index]

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65"

    def __getattr__(self, name: str) -> Any:
        def query(handle: dict[str, Any], *_: Any) -> Any:
            if name not in handle:
                raise self.NVMLError("not supported")
            return handle[name]

        return query


WHOLE = {
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetName": b"NVIDIA H200",
    "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=61_000_000_000, total=150_754_820_096),
    "nvmlDeviceGetPowerUsage": 651_500,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTotalEccErrors": 0,
}


def test_a_sample_of_a_gpu_that_tells_all_and_of_one_that_tells_little(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml([WHOLE, {"nvmlDeviceGetUUID": "GPU-2", "nvmlDeviceGetTemperature": 40}])
    monkeypatch.setattr(gpu, "pynvml", fake)
    probe = GpuProbe.open()
    assert probe is not None
    whole, little = probe.sample()
    assert whole == GpuSample(
        uuid="GPU-1",
        name="NVIDIA H200",
        utilisation=0.97,
        memory_used_gb=61.0,
        memory_total_gb=150.754820096,
        power_w=651.5,
        sm_clock_mhz=1980,
        temperature_c=61,
        ecc_uncorrected=0,
    )
    assert (little.name, little.temperature_c) == ("unknown GPU", 40)
    assert little.utilisation is little.memory_used_gb is little.power_w is little.ecc_uncorrected is None
    assert probe.driver_version() == "580.65"
    probe.close()
    assert fake.open == 0


@pytest.mark.parametrize("fake", [FakeNvml([], driver=False), FakeNvml([])])
def test_no_driver_or_no_gpu_is_none(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml):
    monkeypatch.setattr(gpu, "pynvml", fake)
    assert GpuProbe.open() is None
    assert fake.open == 0
    assert hardware.gpus() == {}


def test_the_functions_that_are_called_exist_in_pynvml():
    import pynvml

    asked = set(WHOLE) | {"nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion"}
    constants = {name for name in vars(FakeNvml) if name.startswith("NVML")}
    assert not [name for name in asked | constants if not hasattr(pynvml, name)]


def test_gpus_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "pynvml", FakeNvml([WHOLE]))
    assert hardware.gpus() == {"driver": "580.65", "devices": [{"name": "NVIDIA H200", "memory_gb": 150.8}]}


def test_environment_is_written_read_and_replaced(tmp_path: Path):
    assert hardware.read_environment(tmp_path) == {}
    for world_size in (2, 4):
        hardware.write_environment(tmp_path, world_size)
    found = hardware.read_environment(tmp_path)
    assert found["world_size"] == 4
    assert {"electra-dist", "python", "torch", "deepspeed"} <= set(found["versions"])
    assert found["cpu"]["memory_gb"] > 0.1
    assert found["cpu"]["model"]
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["cores"]
    assert json.loads((tmp_path / hardware.ENVIRONMENT_FILE).read_text()) == found
    assert [p.name for p in tmp_path.iterdir()] == [hardware.ENVIRONMENT_FILE]


def test_cpu_model_without_proc(tmp_path: Path):
    assert hardware._cpu_model(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n")
    assert hardware._cpu_model(tmp_path / "cpuinfo") == "Fast CPU @ 3 GHz"
