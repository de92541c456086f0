"""The record of a run's environment: GPUs (from a fake NVML driver), CPU, and versions of the software."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fake_nvml import pynvml as fake_nvml

from electra_dist import nvml
from electra_dist.run import environment_record


def test_gpus_are_recorded_with_driver_name_and_memory_and_are_absent_without_a_driver(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nvml, "pynvml", fake_nvml)

    fake_nvml.configure([{}])  # one device without differences from a healthy H200
    gpus_with_driver = environment_record.gpus()
    fake_nvml.configure(None)  # no driver
    gpus_without_driver = environment_record.gpus()

    assert gpus_with_driver == {"driver": "580.65", "devices": [{"name": "NVIDIA H200", "memory_gb": 150.8}]}
    assert gpus_without_driver == {}


def test_the_newest_environment_replaces_the_file_and_is_read_back(tmp_path: Path):
    assert environment_record.read_environment(tmp_path) == {}

    environment_record.write_environment(tmp_path, world_size=2)
    environment_record.write_environment(tmp_path, world_size=4)

    environment = environment_record.read_environment(tmp_path)
    assert environment["world_size"] == 4
    assert {"electra-dist", "python", "torch", "deepspeed"} <= set(environment["versions"])
    cpu = environment["cpu"]
    assert cpu["memory_gb"] > 0.1
    assert cpu["model"]
    assert 1 <= cpu["usable_cores"] <= cpu["cores"]
    assert [path.name for path in tmp_path.iterdir()] == [environment_record.ENVIRONMENT_FILE]
    file = tmp_path / environment_record.ENVIRONMENT_FILE
    assert json.loads(file.read_text()) == environment


def test_the_cpu_model_is_the_first_in_cpuinfo_and_has_a_name_without_that_file(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n")

    assert environment_record._cpu_model(cpuinfo) == "Fast CPU @ 3 GHz"
    assert environment_record._cpu_model(tmp_path / "none")
