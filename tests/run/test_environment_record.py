"""The record of a run's environment: GPUs (from a fake NVML driver), CPU, and versions of the software."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from electra_launcher import pretrain
from support.fake_nvml import pynvml as fake_nvml

from electra_dist import nvml
from electra_dist.errors import NodeError
from electra_dist.run import environment_record
from electra_dist.version import DEEPSPEED


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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs in the files of the kernel and three of a fake driver."""
    for number in range(2):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{number}").touch()
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.3.0\n"
    )
    monkeypatch.setattr(nvml, "pynvml", fake_nvml)
    fake_nvml.configure([{}, {}, {}])
    return tmp_path


def test_a_node_whose_gpus_torch_does_not_see_is_refused_with_the_reason_and_all_versions(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    too_old = RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(too_old))
    with pytest.raises(NodeError) as refused:
        environment_record.check_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, machine)
    line = str(refused.value)
    assert f"has 3 GPUs, but torch sees none: {str(too_old).splitlines()[0].rstrip('.')} (torch" in line
    assert f"torch {torch.__version__} for CUDA 13.0, driver 580.65, CUDA_VISIBLE_DEVICES=0,1); install" in line
    assert "DS_ACCELERATOR=cpu" in line and "\n" not in line


def test_gpus_are_found_where_the_driver_itself_does_not_answer(machine: Path, monkeypatch: pytest.MonkeyPatch):
    """As after an update of the driver without a restart: its library and its kernel module then differ."""
    fake_nvml.configure(None)
    with pytest.raises(NodeError, match=r"has 2 GPUs, but torch sees none: .*driver 570\.86\.15\)"):
        environment_record.check_gpus({}, machine)
    with pytest.raises(NodeError, match="CUDA_VISIBLE_DEVICES=NoDevFiles"):
        environment_record.check_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, machine)


@pytest.mark.parametrize(
    "variables", [{"DS_ACCELERATOR": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}]
)
def test_the_cpu_of_a_node_with_gpus_is_used_if_it_is_asked_for(variables: dict[str, str], machine: Path):
    environment_record.check_gpus(variables, machine)


def test_the_cpu_of_a_node_without_gpus_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "pynvml", fake_nvml)
    fake_nvml.configure(None)
    environment_record.check_gpus({}, tmp_path)


def test_a_gpu_that_torch_sees_is_used(machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    environment_record.check_gpus({}, machine)


@pytest.mark.parametrize("version", ["0.19.0", "0.19.7", "0.19.9", "0.20.0", None])
def test_another_deepspeed_than_the_tested_one_is_refused(version: str | None, monkeypatch: pytest.MonkeyPatch):
    def read(name: str) -> str:
        assert name == "deepspeed"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", read)
    with pytest.raises(NodeError, match=r"deepspeed .*pip install deepspeed==0\.19\.8$") as refused:
        environment_record.check_deepspeed()
    assert (version or "is not installed") in str(refused.value)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+cu128"])
def test_the_tested_deepspeed_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    environment_record.check_deepspeed()


def test_every_place_that_names_deepspeed_names_the_version_that_is_accepted():
    root = Path(__file__).parents[2]
    assert f"deepspeed=={DEEPSPEED}" in (root / "constraints.txt").read_text().splitlines()
    assert f"DeepSpeed {DEEPSPEED}," in (root / "README.md").read_text()
    assert "f\"deepspeed=={VERSIONS['DEEPSPEED']}\"" in (root / "setup.py").read_text()


@pytest.mark.parametrize(("rank", "local_rank", "num_lines"), [(0, 0, 1), (1, 1, 0), (8, 0, 1), (9, 1, 0)])
@pytest.mark.parametrize("fault", ["torch sees none", "deepspeed 0.19.3 is installed"])
def test_a_run_in_a_wrong_environment_ends_with_78_and_one_line_of_each_node(
    rank: int,
    local_rank: int,
    num_lines: int,
    fault: str,
    machine: Path,
    tiny_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    variables = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 16, "LOCAL_SIZE": 8, "MASTER_PORT": 29500}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    if fault.startswith("deepspeed"):
        monkeypatch.setattr(metadata, "version", lambda name: "0.19.3")
    assert pretrain.main(["--config", str(tiny_config())]) == 78
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == num_lines and all(line.startswith("error: ") and fault in line for line in lines)
    assert not (tmp_path / "run").exists()
