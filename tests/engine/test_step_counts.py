"""Check what a training step costs the host, and that it computes bit for bit what DeepSpeed's own step computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.rank_processes import finish_ranks, start_ranks

WORKER = Path(__file__).parent / "step_counts_worker.py"


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """Case -> results of rank 0 of two ranks, with towers of one layer, as step_counts_worker.py prints them."""
    output = finish_ranks(start_ranks(WORKER, 2, "1"))
    line = next(line for line in output[0].splitlines() if line.startswith("COUNTED"))
    cases: dict[str, Any] = json.loads(line.removeprefix("COUNTED "))
    return cases


@pytest.mark.multiproc
@pytest.mark.parametrize("case", ["bf16 1", "bf16 2", "fp32 1"])
def test_losses_and_norms_are_those_of_deepspeeds_own_step_bit_for_bit(counted: dict[str, Any], case: str) -> None:
    results = counted[case]["results"]
    assert results == counted[f"{case} unpatched"]["results"]
    assert [fault for _, _, fault in results] == ["", "", "refused", "the gradient is not finite", "", ""]


@pytest.mark.multiproc
def test_an_exchange_during_the_backward_pass_sums_the_same_bits_over_two_ranks(counted: dict[str, Any]) -> None:
    overlapped = counted["bf16 1 overlap"]
    assert overlapped["results"] == counted["bf16 1 unpatched"]["results"]
    first, *later = overlapped["begun"]
    assert first == 0  # the ranks agree on the order of the buckets at the end of the first backward pass
    assert len(set(later)) == 1
    assert later[0] >= 3


@pytest.mark.multiproc
def test_products_add_gradients_of_weights_to_the_sums_without_rounding_them(counted: dict[str, Any]) -> None:
    """The losses of the first step are the same bits, and the norms differ by the roundings to bf16 that are gone."""
    rounded, exact = counted["bf16 1 unpatched"]["results"], counted["bf16 1 products"]["results"]
    assert exact[0][0] == rounded[0][0]
    assert [fault for _, _, fault in exact] == [fault for _, _, fault in rounded]
    for (_, norm, fault), (_, rounded_norm, _) in zip(exact, rounded, strict=True):
        if fault != "the gradient is not finite":
            assert float.fromhex(norm) == pytest.approx(float.fromhex(rounded_norm), rel=0.02)
    assert [norm for _, norm, _ in exact] != [norm for _, norm, _ in rounded]
    begun = counted["bf16 1 products"]["begun"]
    assert begun == counted["bf16 1 overlap"]["begun"]


@pytest.mark.multiproc
@pytest.mark.parametrize("case", ["bf16 1", "bf16 2", "fp32 1", "bf16 1 overlap"])
def test_the_host_reads_from_the_device_once_in_a_step(counted: dict[str, Any], case: str) -> None:
    phases = counted[case]["phases"]
    assert phases["update"][1] == 1
    assert phases["rest"][1] == 0


@pytest.mark.multiproc
def test_the_update_in_bf16_starts_one_operator_for_each_parameter_and_with_overlap_none(
    counted: dict[str, Any],
) -> None:
    num_tensors = counted["bf16 1"]["tensors"]
    fixed = counted["bf16 1"]["phases"]["update"][0] - num_tensors
    assert 0 < fixed < 80
    assert counted["bf16 1 overlap"]["phases"]["update"][0] < 80
    unpatched = counted["bf16 1 unpatched"]["phases"]
    assert counted["bf16 1"]["phases"]["backward"][0] < unpatched["backward"][0] - 2 * num_tensors
