"""The record of the pretended GPU has every mode, and shows no fault that the drill was made to find."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pretended_gpu.drill import MODES, RECORD, REPOSITORY, header, row, summary
from pretended_gpu.predict import ASSUMPTIONS

from electra_dist.config.load import load_config
from electra_dist.gpu_models import GPU_MEMORY_GB
from electra_dist.planning.activation_memory import FREE_FRACTION

RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="ascii"))


def test_every_mode_is_recorded() -> None:
    assert list(RECORDED) == list(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_products_are_aligned_to_16_bytes_and_the_host_waits_where_it_must(mode: str) -> None:
    numbers = RECORDED[mode]
    alignment = numbers["alignment"]
    assert alignment is None or alignment >= 16
    if mode not in ("zero-0 lamb", "zero-3", "fp16", "offload"):
        assert numbers["micro_batch"]["wait"] == 0
        assert numbers["update"]["wait"] == 1


@pytest.mark.parametrize("mode", ["large", "fast"])
def test_large_starts_no_kernel_for_each_gradient_and_copies_no_activations(mode: str) -> None:
    """Its towers have 592 parameters, 144 or 192 of them weights of layers, whose products add to the sums."""
    numbers = RECORDED[mode]
    assert numbers["micro_batch"]["copied_mb"] < 1
    assert numbers["micro_batch"]["launch"] < 950
    assert numbers["update"]["launch"] < 100
    into_sums = [count for name, count in numbers["products"].items() if "inbf16 outfp32" in name]
    assert sum(into_sums) >= 144


@pytest.mark.parametrize("mode", ["large", "fast"])
def test_the_rows_of_the_large_configs_fit_into_80_gb_and_twice_as_many_do_not(mode: str) -> None:
    rows = load_config(REPOSITORY / "configs" / MODES[mode].file, ["data.corpus=corpus"]).train.micro_batch
    assert f"train.micro_batch={rows}" in MODES[mode].overrides
    assert f"train.micro_batch={2 * rows}" in MODES[f"{mode} 128"].overrides
    usable_gb = (1 - FREE_FRACTION) * GPU_MEMORY_GB["A100"]
    assert RECORDED[mode]["reserved_gb"] < usable_gb < RECORDED[f"{mode} 128"]["reserved_gb"]


def test_a_row_has_a_cell_for_each_title() -> None:
    counts = [
        {"kind": "launch", "name": "a kernel", "events": 3, "bytes": 0},
        {"kind": "product", "name": "lt m8 n8 k8 inbf16 outbf16 align16", "events": 2, "bytes": 0},
        {"kind": "copy", "name": "within the device", "events": 1, "bytes": 5_000_000},
        {"kind": "copy", "name": "to the host", "events": 1, "bytes": 8},
    ]
    peaks = {"peak_bytes": 2_000_000_000, "reserved_bytes": 3_000_000_000}
    numbers = summary({"attention": "flash", "micro_batch": counts, "update": [], **peaks})
    assert numbers["micro_batch"] == {
        "launch": 3,
        "product": 2,
        "fill": 0,
        "wait": 0,
        "copies": 1,
        "copied_mb": 5.0,
        "host_copies": 1,
        "exchanged_mb": 0.0,
    }
    assert (numbers["alignment"], numbers["peak_gb"], numbers["reserved_gb"]) == (16, 2.0, 3.0)
    assert row("a mode", numbers).count("|") == header().splitlines()[0].count("|")


def test_a_part_of_the_benchmark_tests_every_assumption_and_its_value_lies_in_its_range() -> None:
    benchmark = (REPOSITORY / "benchmarks" / "gpu.py").read_text(encoding="utf-8")
    for name, assumption in ASSUMPTIONS.items():
        assert f'"{assumption.tested_by}": ' in benchmark, name
        assert min(assumption.bad, assumption.good) < assumption.value < max(assumption.bad, assumption.good), name
