"""A GPU's branch of a micro-batch on `meta` tensors: every objective, dtype and setting; its numbers never rise."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from support.rehearsal_cases import CASES, RECORD, REFRESH, count_cases
from support.torch_versions import needs_products_on_meta


def _flat(recorded: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of a case with a name for each, the kernels' launches among them."""
    launches = {f"launches of {kernel}": count for kernel, count in recorded["launches"].items()}
    return launches | {name: value for name, value in recorded.items() if name != "launches"}


def compare(name: str, counted: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Fail if a number of a case is above the record; warn if one is below it."""
    counted_numbers = _flat(counted)
    recorded_numbers = _flat(recorded)
    above = []
    below = []
    for number in counted_numbers.keys() | recorded_numbers.keys():
        now = counted_numbers.get(number, 0)
        before = recorded_numbers.get(number, 0)
        if now > before:
            above.append(f"{number}: {before} -> {now}")
        elif now < before:
            below.append(f"{number}: {before} -> {now}")
    if above:
        pytest.fail(
            f"{name}: {'; '.join(sorted(above))}. Undo what raised it or, if the rise is wanted, run `{REFRESH}`"
        )
    if below:
        warnings.warn(f"{name}: {'; '.join(sorted(below))}. Keep the gain: run `{REFRESH}`", stacklevel=2)


@pytest.fixture(scope="module")
def counted_cases() -> dict[str, Any]:
    return count_cases(compiled=False)


@needs_products_on_meta
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.compiled])
def test_a_micro_batch_runs_as_recorded(name: str, counted_cases: dict[str, Any]) -> None:
    counted = counted_cases[name]
    assert not isinstance(counted, str), counted
    assert counted.pop("compiled_norms") == 0
    record = json.loads(RECORD.read_text())
    assert name in record, f"{RECORD} has no such case; run `{REFRESH}`"
    if record["torch"] != torch.__version__.split("+")[0]:
        pytest.skip(f"it runs; its numbers were recorded with torch {record['torch']}")
    compare(name, counted, record[name])


def test_the_record_has_no_other_cases() -> None:
    assert set(json.loads(RECORD.read_text())) == {"torch", *CASES}


def test_numbers_may_fall_and_not_rise() -> None:
    recorded = {"operators": 10, "peak_kB_per_row": 5, "launches": {"row": 1}}
    compare("case", recorded, recorded)
    for change in ({"operators": 11}, {"peak_kB_per_row": 6}, {"launches": {"row": 2}}, {"launches": {"new": 1}}):
        with pytest.raises(pytest.fail.Exception, match="rehearsal_cases"):
            compare("case", recorded | change, recorded)
    for change in ({"operators": 9}, {"launches": {}}):
        with pytest.warns(UserWarning, match="Keep the gain"):
            compare("case", recorded | change, recorded)
