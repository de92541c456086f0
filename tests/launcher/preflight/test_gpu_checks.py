"""Which GPUs are trusted: every kind of fault through a fake driver, and speeds compared."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.nvml import GpuHealth, GpuProbe
from launcher.preflight.findings import Finding
from launcher.preflight.gpu_checks import Speed, classify_gpus, classify_load, classify_speeds

LOST = fake.NVML_ERROR_GPU_IS_LOST


@pytest.fixture(autouse=True)
def _fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", fake)


def health(*devices: dict[str, Any]) -> list[GpuHealth]:
    fake.configure(list(devices))
    probe = GpuProbe.open()
    assert probe is not None
    return probe.health()


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.device) for finding in findings]


def test_a_sound_node_is_one_ok_line_a_gpu():
    findings = classify_gpus(health({}, {"throttle": 0x4}), "n1")
    assert told(findings) == [("ok", "GPU 0"), ("ok", "GPU 1")]
    assert [f.what for f in findings] == [
        "NVIDIA H200: 61 C, 652 W, 1755 MHz",
        "NVIDIA H200: 61 C, 652 W, 1755 MHz, power cap",  # at its power limit: as it should be
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
        ({"recovery_action": 1}, "unhealthy", "the driver asks to reset the GPU", "do as it asks"),
        ({"recovery_action": 2}, "unhealthy", "the driver asks to reboot the node", "do as it asks"),
        ({"recovery_action": 4}, "unhealthy", "the driver asks to drain and reset the GPU", "do as it asks"),
        ({"recovery_action": 99}, "unhealthy", "the driver asks to take recovery action 99", "do as it asks"),
        ({"throttle": 0x08}, "unhealthy", "slowed down: hardware slowdown", "cooling and power"),
        ({"throttle": 0x40}, "unhealthy", "slowed down: hardware thermal slowdown", "cooling and power"),
        ({"throttle": 0x80}, "unhealthy", "slowed down: power brake", "cooling and power"),
        ({"throttle": 0x20}, "warning", "slowed down: software thermal slowdown", "cooling"),
        ({"temperature": 87}, "unhealthy", "87 C, it slows down at 87 C", "cooling"),
        ({"temperature": 82}, "warning", "82 C, it slows down at 87 C", "cooling"),
        ({"temperature": 90, "slowdown": "unsupported"}, "unhealthy", "90 C, it slows down at 90 C", "cooling"),
        ({"nvlinks": [1] * 17 + [0]}, "unhealthy", "17 active NVLinks, its neighbours have 18", "reset this GPU"),
        ({"handle_error": LOST}, "unhealthy", "lost: GPU is lost", "reboot the node"),
        ({"query_error": fake.NVML_ERROR_RESET_REQUIRED}, "unhealthy", "lost: GPU requires reset", "reboot"),
    ],
)
def test_a_fault_of_one_gpu_is_named_with_its_next_step_and_its_neighbour_stays_sound(
    device: dict[str, Any], severity: str, words: str, next_step: str
):
    sound, faulty = classify_gpus(health({}, device), "n1")
    assert (sound.severity, sound.device) == ("ok", "GPU 0")
    assert (faulty.severity, faulty.node, faulty.device) == (severity, "n1", "GPU 1")
    assert words in faulty.what
    assert next_step in faulty.next_step


def test_a_gpu_just_below_every_limit_is_sound_and_one_that_tells_nothing_is_no_fault():
    silent = {key: "unsupported" for key in fake.HEALTHY if not key.endswith("_error")}
    findings = classify_gpus(health({"temperature": 81, "remapped_rows": [9, 2, 0, 0]}, silent), "n1")
    assert told(findings) == [("ok", "GPU 0"), ("unhealthy", "GPU 1")]  # no NVLinks beside a neighbour that has 18
    assert told(classify_gpus(health(silent), "n1")) == [("ok", "GPU 0")]
    assert classify_gpus(health(silent), "n1")[0].what == "unknown GPU: it reports nothing"


def test_links_that_are_down_on_all_gpus_alike_are_a_warning_and_no_links_at_all_are_none():
    half = {"nvlinks": [1, 1, 0, 0]}
    assert told(classify_gpus(health(half, half), "n1")) == [("warning", "GPU 0"), ("warning", "GPU 1")]
    bridge_not_fitted, without = {"nvlinks": [0, 0]}, {"nvlinks": []}
    assert told(classify_gpus(health(bridge_not_fitted, without), "n1")) == [("ok", "GPU 0"), ("ok", "GPU 1")]


def test_several_faults_of_a_gpu_are_several_lines():
    findings = classify_gpus(health({"ecc_volatile": 1, "throttle": 0x48, "recovery_action": 1}), "n1")
    assert told(findings) == [("unhealthy", "GPU 0")] * 4


def test_under_load_heat_and_clock_are_looked_at_and_old_errors_are_not_told_again():
    findings = classify_load(health({}, {"sm_clock": 900}, {"throttle": 0x40}, {"ecc_volatile": 1}), "n1")
    assert told(findings) == [("ok", "GPU 0"), ("warning", "GPU 1"), ("unhealthy", "GPU 2"), ("ok", "GPU 3")]
    assert findings[0].what == "under load: 61 C, 652 W, 1755 MHz"
    assert findings[1].what == "clock 900 of 1980 MHz under load"


def test_a_device_is_slow_beyond_the_factor_only_and_its_node_is_not_called_ok():
    speeds = [Speed(node=f"n{i // 2}", device=f"cuda:{i % 2}", tflops=t) for i, t in enumerate([700, 690, 400, 705])]
    findings = classify_speeds(speeds)
    assert [(f.severity, f.node, f.device) for f in findings] == [("unhealthy", "n1", "cuda:0"), ("ok", "n0", "")]
    assert findings[0].what == "matrix product at 400 TFLOP/s, the median is 695"
    assert findings[1].what == "matrix product at 690 to 700 TFLOP/s; median of 4: 695"
    within = [Speed(node="n0", device="cuda:0", tflops=t) for t in (130.0, 130.0, 101.0)]
    assert [f.severity for f in classify_speeds(within)] == ["ok"]
    assert classify_speeds([]) == []
