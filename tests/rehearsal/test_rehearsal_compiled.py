"""The rehearsal of compiled layers: each objective under torch.compile on `meta`, its operators before fusion."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.rehearsal_cases import CASES, RECORD, count_cases


@pytest.fixture(scope="module")
def counted_cases() -> dict[str, Any]:
    return count_cases(compiled=True)


@pytest.mark.sample
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compiled])
def test_a_compiled_micro_batch_runs_as_recorded(name: str, counted_cases: dict[str, Any]) -> None:
    counted = counted_cases[name]
    assert not isinstance(counted, str), counted
    launches = counted["launches"]
    # All layers were compiled: of `bert`, eager ones call no custom operator; of `modern`, only they launch a kernel.
    assert counted["compiled_norms"] == launches.get("norm_forward", 0)
    assert "rotary" not in launches
    record = json.loads(RECORD.read_text())
    if record["torch"] != torch.__version__.split("+")[0]:
        pytest.skip(f"it runs; its numbers were recorded with torch {record['torch']}")
    assert counted["launches"] == record[name]["launches"]
    assert counted["operators"] <= record[name]["operators"]
    assert counted["peak_kB_per_row"] <= record[name]["peak_kB_per_row"]
