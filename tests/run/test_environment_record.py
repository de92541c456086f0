"""The record of a run's environment: GPUs (from a fake NVML driver), CPU, and versions of the software."""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_the_record_names_the_command_the_hosts_and_the_corpus(tmp_path: Path):
    corpus = {"rows": 10, "tokens": 1000, "seq_len": 128}

    environment_record.write_environment(tmp_path, world_size=3, hosts=["a", "b", "a"], corpus=corpus)

    environment = environment_record.read_environment(tmp_path)
    assert environment["command"] == sys.argv
    assert environment["hosts"] == {"a": 2, "b": 1}
    assert environment["corpus"] == corpus


def git(folder: Path, *arguments: str) -> str:
    """Run a git command in a folder as an author of its own, and return what it prints."""
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", folder, *author, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_source_code_and_shows_whether_it_was_changed(tmp_path: Path):
    """A folder of the code is tracked in one repository, and only lies inside the other, as an installed package."""
    code = tmp_path / "code" / "run"
    code.mkdir(parents=True)
    source = code / Path(environment_record.__file__).name
    source.write_text("a = 1\n")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "--quiet", "-m", "without the code")
    of_untracked_code = environment_record.commit(code)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "with the code")
    sha = git(tmp_path, "rev-parse", "HEAD")
    of_clean_code = environment_record.commit(code)
    source.write_text("a = 2\n")
    of_changed_code = environment_record.commit(code)

    assert of_untracked_code is None
    assert of_clean_code == {"sha": sha, "has_changes": False}
    assert of_changed_code == {"sha": sha, "has_changes": True}


def test_the_cpu_model_is_the_first_in_cpuinfo_and_has_a_name_without_that_file(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n")

    assert environment_record._cpu_model(cpuinfo) == "Fast CPU @ 3 GHz"
    assert environment_record._cpu_model(tmp_path / "none")
