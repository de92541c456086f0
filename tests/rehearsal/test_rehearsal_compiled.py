"""The rehearsal of compiled layers: each objective under torch.compile on `meta`, its operators before fusion."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from support.rehearsal_cases import CASES, RECORD, numbers, run
from torch._dynamo.utils import counters


@pytest.fixture(scope="module", autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compiled])
def test_a_compiled_micro_batch_runs_as_recorded(name: str) -> None:
    figures = run(CASES[name])
    compiled_norms = figures.operators["electra.dropout_add_norm.default"]
    launched_norms = figures.kernel_counts["norm_forward_kernel"]
    assert compiled_norms == launched_norms  # every layer was compiled; eager layers call no custom operator
    record = json.loads(RECORD.read_text())
    if record["torch"] != torch.__version__.split("+")[0]:
        pytest.skip(f"it runs; its numbers were recorded with torch {record['torch']}")
    counted = numbers(CASES[name], figures)
    assert counted["launches"] == record[name]["launches"]
    assert counted["operators"] <= record[name]["operators"]
    assert counted["peak_kB_per_row"] <= record[name]["peak_kB_per_row"]
