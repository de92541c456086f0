"""The table of registers over Triton's versions: what it says of spills and refusals, and that the page has it."""

import json
from typing import Any

import kernel_versions
import pytest
from measure import RESULTS


def _row(version: str, arch: int, registers: int, stack_bytes: int = 0) -> dict[str, Any]:
    resources = {"registers": registers, "stack_bytes": stack_bytes, "shared_bytes": 32}
    return {"triton": version, "name": "row", "dtype": "bf16", "arch": arch, **resources}


def _record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"date": "2026-11-22T10:00:00+00:00", "assemblers": {"3.9.0": {"ptxas": "12.9"}}, "rows": rows}


def test_the_table_has_the_least_and_the_most_registers_of_all_versions() -> None:
    rows = [_row("3.4.0", 80, 40), _row("3.9.0", 80, 38), _row("3.4.0", 90, 50), _row("3.9.0", 90, 50)]
    assert kernel_versions.page_table(_record(rows)).splitlines()[-1] == "| row | bf16 | 38 to 40 | 50 | 0 | 32 |"
    assert kernel_versions.faults(rows) == []


def test_a_spill_and_a_refusal_are_faults_with_their_version() -> None:
    refused = {"triton": "3.10.0", "name": "row", "dtype": "bf16", "arch": 90, "error": "PTXASError: no such target"}
    rows = [_row("3.9.0", 80, 255, stack_bytes=96), refused]
    assert kernel_versions.faults(rows) == [
        "triton 3.9.0, sm_80: row bf16 spills: 96 bytes of stack",
        "triton 3.10.0, sm_90: row bf16: PTXASError: no such target",
    ]
    assert "refused by 3.10.0" in kernel_versions.page_table(_record(rows))


def test_versions_since_3_4_are_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "triton (3.10.0)\nAvailable versions: 3.10.0, 3.9.1, 3.4.0, 3.3.1, 2.0.0\n  INSTALLED: 3.9.0\n"

    class Done:
        stdout = printed

    monkeypatch.setattr(kernel_versions.subprocess, "run", lambda *_, **__: Done)
    assert kernel_versions.offered_versions() == ["3.4.0", "3.9.1", "3.10.0"]


def test_the_page_has_the_table_of_the_newest_record() -> None:
    record = json.loads(max(RESULTS.glob("kernel_versions-*.json")).read_text())
    assert kernel_versions.faults(record["rows"]) == []
    page = kernel_versions.PAGE.read_text()
    assert kernel_versions.rewrite(page, record) == page
