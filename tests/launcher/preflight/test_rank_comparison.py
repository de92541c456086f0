"""Slow and faulty ranks are found: reports of ranks, load on devices, and three real ranks over gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from electra_launcher.preflight import rank_comparison
from electra_launcher.preflight.findings import Finding
from electra_launcher.preflight.gpu_checks import Speed
from electra_launcher.preflight.rank_comparison import RankReport, check_load, classify_ranks, partner
from hypothesis import given
from hypothesis import strategies as st
from support.fake_nvml import pynvml as fake
from support.real_runs import REPOSITORY
from support.torch_versions import without_gloo_lines

from electra_dist import nvml
from electra_dist.run.failures import read_strikes


@given(st.integers(3, 20), st.data())
def test_a_rank_with_a_slow_link_is_the_only_one_of_a_ring_that_is_reported(count: int, data: st.DataObject):
    slow = data.draw(st.integers(0, count - 1))
    reports = []
    for rank in range(count):
        others = [partner(rank, count, turn) for turn in range(3)]
        seconds = [9.0 if slow in (rank, other) else 1.0 for other in others[: 2 + count % 2] if other is not None]
        reports.append(report(rank, node=f"n{rank}", exchange_s=min(seconds)))
    named = [f for f in classify_ranks(reports, on_gpu=True) if f.severity == "unhealthy"]
    assert [(f.node, f.device) for f in named] == [(f"n{slow}", f"rank {slow}")]


def report(rank: int, node: str = "n0", **changes: object) -> RankReport:
    """Return the report of a healthy rank; `changes` replace its fields."""
    fields: dict = {"skew_s": 0.0, "speed": None, "exchange_s": None, "all_reduce_gb_s": 10.0, "findings": ()}
    return RankReport(**{**fields, "rank": rank, "node": node, **changes})


def test_findings_of_all_ranks_are_joined_with_those_of_clocks_speeds_and_the_slowest_all_reduce():
    sick = Finding(severity="unhealthy", node="n1", device="GPU 0", what="hot")
    reports = [
        report(0, "n0", speed=Speed(node="n0", device="cuda:0", tflops=700.0), all_reduce_gb_s=20.0),
        report(1, "n0", speed=Speed(node="n0", device="cuda:1", tflops=690.0), skew_s=99.0),
        report(2, "n1", speed=Speed(node="n1", device="cuda:0", tflops=300.0), findings=(sick,), skew_s=-5.0),
    ]
    findings = classify_ranks(reports, on_gpu=True)
    assert [(f.severity, f.node, f.what) for f in findings] == [
        ("unhealthy", "n1", "hot"),
        ("ok", "n0", "clock agrees with the other nodes"),  # the clock of a node is that of its first rank
        ("warning", "n1", "clock is 5 s behind the other nodes"),
        ("unhealthy", "n1", "matrix product at 300 TFLOP/s, but the median is 690"),
        ("ok", "n0", "matrix product at 690 to 700 TFLOP/s; median of 3: 690"),
        ("ok", "", "all-reduce over 3 ranks: 10.00 GB/s"),
    ]


def test_a_slow_rank_without_gpus_is_a_warning_and_without_measurements_no_rank_is_slow():
    slow = [report(rank, exchange_s=9.0 if rank == 2 else 1.0) for rank in range(4)]
    assert [f.severity for f in classify_ranks(slow, on_gpu=False)] == ["warning", "ok"]
    untried = [report(rank, all_reduce_gb_s=None) for rank in range(2)]
    assert [f.what for f in classify_ranks(untried, on_gpu=True)] == ["no all-reduce was tried"]


def test_a_rank_is_slow_in_comparison_with_the_median_and_not_with_the_fastest_rank():
    """Only rank 0 is on the same switch as its neighbour; the last rank takes 2.1 times the median of 2.0 s."""
    seconds = [0.5, 2.0, 2.0, 2.0, 4.2]
    reports = [report(rank, exchange_s=exchange_s) for rank, exchange_s in enumerate(seconds)]
    slow = [finding for finding in classify_ranks(reports, on_gpu=True) if finding.severity == "unhealthy"]
    assert [finding.device for finding in slow] == ["rank 4"]
    assert slow[0].what == "exchanges data 2.1 times slower than the median rank"


def test_load_check_finds_faults_that_appear_under_load_and_names_the_device_that_fails(
    monkeypatch: pytest.MonkeyPatch,
):
    def product(device: torch.device, size: int, seconds: float) -> float:
        devices[1]["throttle"] = 0x80  # appears only under load
        time.sleep(seconds)
        if device.index == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE_CUDA_DSA")
        return 700.0

    fake.configure([{}, {}])
    devices = [fake.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    monkeypatch.setattr(nvml, "pynvml", fake)
    monkeypatch.setattr(rank_comparison, "matmul_tflops", product)
    monkeypatch.setattr(rank_comparison, "LOAD_S", 0.3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    findings = check_load("n1")
    assert [(f.severity, f.device, f.what) for f in findings] == [
        ("ok", "GPU 0", "under load: 61 C, 652 W, 1755 MHz"),
        ("unhealthy", "GPU 1", "slowed down: power brake"),
        ("unhealthy", "cuda:1", "a matrix product failed: CUDA error: uncorrectable ECC error encountered"),
        ("ok", "", "matrix product at 700 to 700 TFLOP/s; median of 1: 700"),
    ]
    assert fake.open_count == 0


@pytest.mark.parametrize(("accelerator", "severity"), [(None, "user error"), ("cpu", "warning")])
def test_a_node_whose_gpus_torch_does_not_see_must_not_start_unless_the_cpu_is_asked_for(
    accelerator: str | None, severity: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nvml, "pynvml", fake)
    fake.configure([{}, {}])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if accelerator is not None:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    (finding,) = check_load("n1")
    assert finding.severity == severity and re.search("sees no(ne| GPU)", finding.what)


def test_ranks_on_a_node_whose_gpus_torch_does_not_see_do_not_compare_their_cpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "pynvml", fake)
    fake.configure([{}, {}])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    own = Finding(severity="ok", node="n1", what="a check before")
    first, second = rank_comparison.check_ranks("n1", [own])
    assert first == own
    assert second.severity == "user error" and "has 2 GPUs, but torch sees none" in second.what


def start_rank(
    config: Path, rank: int, world_size: int, port: int, code: str = "", **env: str
) -> subprocess.Popen[str]:
    """Start the preflight of one rank on a node of its own; `code` replaces the module that is run."""
    launched = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    command = [
        sys.executable,
        *(["-c", code] if code else ["-m", "electra_launcher.preflight"]),
        "--config",
        str(config),
    ]
    return subprocess.Popen(
        command,
        env={**os.environ, **launched, "MASTER_PORT": str(port), "SLURMD_NODENAME": f"n{rank}", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.multiproc
def test_of_three_nodes_only_the_unhealthy_one_ends_with_69_and_gets_a_strike(
    tiny_config: Callable[..., Path], free_port: int
):
    config = tiny_config()
    stub = {
        "PYTHONPATH": str(REPOSITORY / "tests" / "support" / "fake_nvml"),
        "FAKE_NVML": json.dumps([{"ecc_volatile": 1}]),
    }
    ranks = [start_rank(config, rank, 3, free_port, **(stub if rank == 1 else {})) for rank in range(3)]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 69, 0], outputs
    first, *others = (without_gloo_lines(out) for out, _ in outputs)
    assert others == ["", ""]  # only rank 0 prints
    lines = first.splitlines()
    assert sum(line.startswith("unhealthy   n1 GPU 0") for line in lines) == 1
    assert sum("clock agrees with the other nodes" in line for line in lines) == 3
    assert sum("all-reduce over 3 ranks" in line for line in lines) == 1
    run_dir = config.parent / "run"
    assert [(s.node, s.device, s.by) for s in read_strikes(run_dir)] == [("n1", "GPU 0", "preflight")]


@pytest.mark.multiproc
def test_a_rank_that_cannot_reach_the_others_ends_with_1_and_no_node_gets_a_strike(
    tiny_config: Callable[..., Path], free_port: int
):
    code = (
        "import sys, datetime, electra_launcher.preflight.rank_comparison as r\n"
        "r.TIMEOUT = datetime.timedelta(seconds=3)\n"
        "from electra_launcher.preflight.__main__ import main; sys.exit(main(sys.argv[1:]))\n"
    )
    config = tiny_config()
    alone = start_rank(config, 0, 2, free_port, code)
    out, err = alone.communicate(timeout=120)
    assert alone.returncode == 1, (out, err)
    assert "all nodes         the 2 ranks cannot work together" in out
    assert read_strikes(config.parent / "run") == []


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
