"""The environment of this machine, its GPUs by a fake driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.run import environment_record


def test_gpus_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "pynvml", fake)
    fake.configure([{}])
    assert environment_record.gpus() == {"driver": "580.65", "devices": [{"name": "NVIDIA H200", "memory_gb": 150.8}]}
    fake.configure(None)
    assert environment_record.gpus() == {}


def test_environment_is_written_read_and_replaced(tmp_path: Path):
    assert environment_record.read_environment(tmp_path) == {}
    for world_size in (2, 4):
        environment_record.write_environment(tmp_path, world_size)
    found = environment_record.read_environment(tmp_path)
    assert found["world_size"] == 4
    assert {"electra-dist", "python", "torch", "deepspeed"} <= set(found["versions"])
    assert found["cpu"]["memory_gb"] > 0.1
    assert found["cpu"]["model"]
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["cores"]
    assert json.loads((tmp_path / environment_record.ENVIRONMENT_FILE).read_text()) == found
    assert [p.name for p in tmp_path.iterdir()] == [environment_record.ENVIRONMENT_FILE]


def test_cpu_model_without_proc(tmp_path: Path):
    assert environment_record._cpu_model(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n")
    assert environment_record._cpu_model(tmp_path / "cpuinfo") == "Fast CPU @ 3 GHz"
