"""GPU checks: each kind of fault through a fake driver, and the comparison of speeds."""

from __future__ import annotations

from typing import Any

import pytest
from electra_launcher.preflight.findings import Finding
from electra_launcher.preflight.gpu_checks import Speed, classify_gpus, classify_load, classify_speeds
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.nvml import GpuHealth, GpuProbe

LOST = fake.NVML_ERROR_GPU_IS_LOST


@pytest.fixture(autouse=True)
def _fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", fake)


def health(*devices: dict[str, Any]) -> list[GpuHealth]:
    """Return the health of fake GPUs, each given as a dict of differences from a healthy one."""
    fake.configure(list(devices))
    probe = GpuProbe.open()
    assert probe is not None
    return probe.health()


def severities(findings: list[Finding]) -> list[tuple[str, str]]:
    """Return the severity and device of each finding."""
    return [(finding.severity, finding.device) for finding in findings]


def test_a_healthy_node_gives_one_ok_finding_per_gpu():
    findings = classify_gpus(health({}, {"throttle": 0x4}), "n1")
    assert severities(findings) == [("ok", "GPU 0"), ("ok", "GPU 1")]
    assert [f.what for f in findings] == [
        "NVIDIA H200: 61 C, 652 W, 1755 MHz",
        "NVIDIA H200: 61 C, 652 W, 1755 MHz, power cap",  # a GPU at its power limit is healthy
    ]


@pytest.mark.parametrize(
    ("device", "severity", "words", "next_step"),
    [
        ({"ecc_volatile": 3, "ecc_aggregate": 3}, "unhealthy", "3 uncorrected memory errors since", "reset this GPU"),
        ({"ecc_aggregate": 3}, "warning", "3 uncorrected memory errors in its life", "replace it if"),
        ({"remapped_rows": [9, 2, 0, 1]}, "unhealthy", "could not be replaced by a spare", "replace this GPU"),
        ({"remapped_rows": [9, 2, 1, 0]}, "unhealthy", "row of its memory waits", "reset this GPU"),
        ({"retirement_pending": 1}, "unhealthy", "page of its memory waits", "reset this GPU"),
        ({"retired_pages": 5}, "warning", "5 pages of its memory were retired", "replace it if"),
        ({"recovery_action": 1}, "unhealthy", "the driver asks to reset the GPU", "do this"),
        ({"recovery_action": 2}, "unhealthy", "the driver asks to reboot the node", "do this"),
        ({"recovery_action": 4}, "unhealthy", "the driver asks to drain and reset the GPU", "do this"),
        ({"recovery_action": 99}, "unhealthy", "the driver asks to take recovery action 99", "do this"),
        ({"throttle": 0x08}, "unhealthy", "slowed down: hardware slowdown", "cooling and power"),
        ({"throttle": 0x40}, "unhealthy", "slowed down: hardware thermal slowdown", "cooling and power"),
        ({"throttle": 0x80}, "unhealthy", "slowed down: power brake", "cooling and power"),
        ({"throttle": 0x20}, "warning", "slowed down: software thermal slowdown", "cooling"),
        ({"temperature": 87}, "unhealthy", "is at 87 C and slows down at 87 C", "cooling"),
        ({"temperature": 82}, "warning", "is at 82 C and slows down at 87 C", "cooling"),
        ({"temperature": 90, "slowdown": "unsupported"}, "unhealthy", "is at 90 C and slows down at 90 C", "cooling"),
        ({"nvlinks": [1] * 17 + [0]}, "unhealthy", "17 active NVLinks, but its neighbours have 18", "reset this GPU"),
        ({"handle_error": LOST}, "unhealthy", "does not answer (lost): GPU is lost", "reboot the node"),
        (
            {"query_error": fake.NVML_ERROR_RESET_REQUIRED},
            "unhealthy",
            "does not answer (lost): GPU requires reset",
            "reboot",
        ),
    ],
)
def test_a_fault_of_one_gpu_is_named_with_its_next_step_and_the_other_gpu_is_ok(
    device: dict[str, Any], severity: str, words: str, next_step: str
):
    sound, faulty = classify_gpus(health({}, device), "n1")
    assert (sound.severity, sound.device) == ("ok", "GPU 0")
    assert (faulty.severity, faulty.node, faulty.device) == (severity, "n1", "GPU 1")
    assert words in faulty.what
    assert next_step in faulty.next_step


def test_a_gpu_just_below_every_limit_is_ok_and_so_is_one_that_answers_no_query():
    silent = {key: "unsupported" for key in fake.HEALTHY if not key.endswith("_error")}
    findings = classify_gpus(health({"temperature": 81, "remapped_rows": [9, 2, 0, 0]}, silent), "n1")
    assert severities(findings) == [("ok", "GPU 0"), ("unhealthy", "GPU 1")]  # no NVLinks, while the other GPU has 18
    assert severities(classify_gpus(health(silent), "n1")) == [("ok", "GPU 0")]
    assert classify_gpus(health(silent), "n1")[0].what == "unknown GPU: it reports nothing"


def test_links_that_are_down_on_all_gpus_are_a_warning_and_gpus_without_links_are_ok():
    half = {"nvlinks": [1, 1, 0, 0]}
    assert severities(classify_gpus(health(half, half), "n1")) == [("warning", "GPU 0"), ("warning", "GPU 1")]
    bridge_not_fitted, without = {"nvlinks": [0, 0]}, {"nvlinks": []}
    assert severities(classify_gpus(health(bridge_not_fitted, without), "n1")) == [("ok", "GPU 0"), ("ok", "GPU 1")]


def test_each_fault_of_a_gpu_is_a_finding_of_its_own():
    findings = classify_gpus(health({"ecc_volatile": 1, "throttle": 0x48, "recovery_action": 1}), "n1")
    assert severities(findings) == [("unhealthy", "GPU 0")] * 4


def test_under_load_heat_and_clock_are_checked_and_memory_errors_are_not_reported_again():
    findings = classify_load(health({}, {"sm_clock": 900}, {"throttle": 0x40}, {"ecc_volatile": 1}), "n1")
    assert severities(findings) == [("ok", "GPU 0"), ("warning", "GPU 1"), ("unhealthy", "GPU 2"), ("ok", "GPU 3")]
    assert findings[0].what == "under load: 61 C, 652 W, 1755 MHz"
    assert findings[1].what == "clock of only 900 MHz under load, of 1980 MHz possible"


def test_a_device_is_slow_only_beyond_the_factor_and_its_node_is_not_reported_as_ok():
    speeds = [Speed(node=f"n{i // 2}", device=f"cuda:{i % 2}", tflops=t) for i, t in enumerate([700, 690, 400, 705])]
    findings = classify_speeds(speeds)
    assert [(f.severity, f.node, f.device) for f in findings] == [("unhealthy", "n1", "cuda:0"), ("ok", "n0", "")]
    assert findings[0].what == "matrix product at 400 TFLOP/s, but the median is 695"
    assert findings[1].what == "matrix product at 690 to 700 TFLOP/s; median of 4: 695"
    within = [Speed(node="n0", device="cuda:0", tflops=t) for t in (130.0, 130.0, 101.0)]
    assert [f.severity for f in classify_speeds(within)] == ["ok"]
    assert classify_speeds([]) == []
