"""Findings: the exit code and the strike that follow from them, their printed lines, and their JSON."""

from __future__ import annotations

import pytest
from electra_launcher.preflight.findings import Finding, as_json, exit_code, from_error, print_findings, strike_of


def finding(severity: str, node: str = "n1", device: str = "", what: str = "x") -> Finding:
    """Return a finding with defaults for what a test does not care about."""
    return Finding(severity=severity, node=node, device=device, what=what)  # type: ignore[arg-type]


def test_the_exit_code_counts_findings_of_this_node_and_a_user_error_takes_precedence():
    sick, full, warm, fine = finding("unhealthy"), finding("user error"), finding("warning"), finding("ok")
    assert exit_code([fine, warm], "n1") == 0
    assert exit_code([fine, sick, warm], "n1") == 69
    assert exit_code([sick, full], "n1") == 78
    assert exit_code([sick, full], "n2") == 0
    without_node = finding("unhealthy", node="")
    assert exit_code([without_node], "n1") == exit_code([without_node], "n2") == 1
    assert exit_code([without_node, sick], "n1") == 69


def test_a_node_gets_one_strike_for_all_its_faults_and_none_for_warnings_or_faults_of_no_node():
    faults = [finding("unhealthy", device="GPU 3", what="hot"), finding("unhealthy", device="GPU 5", what="lost")]
    strike = strike_of([*faults, finding("warning"), finding("unhealthy", "n2")], "n1", 12.5)
    assert strike is not None
    assert (strike.time, strike.node, strike.device) == (12.5, "n1", "GPU 3, GPU 5")
    assert (strike.reason, strike.by) == ("hot; lost", "preflight")
    harmless = [finding("ok"), finding("warning"), finding("user error"), finding("unhealthy", node="")]
    assert strike_of(harmless, "n1", 0.0) is None


def test_an_error_of_the_store_becomes_a_finding_with_its_next_step():
    from electra_dist.errors import StoreError

    result = from_error(StoreError("s3://b: refused; give the key the right to write"), "n1")
    assert (result.severity, result.what) == ("user error", "s3://b: refused")
    assert result.next_step == "give the key the right to write"


def test_findings_are_printed_as_one_line_each_where_the_output_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    import sys

    print_findings([finding("unhealthy", device="GPU 3", what="hot"), finding("ok", node="")], sys.stdout)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["unhealthy", "n1", "GPU", "3", "hot"], ["ok", "all", "nodes", "x"]]


def test_json_has_the_exit_code_and_every_finding():
    import json

    tree = json.loads(as_json(iter([finding("unhealthy", device="GPU 3"), finding("ok")]), "n1"))
    assert (tree["node"], tree["exit_code"]) == ("n1", 69)
    assert tree["findings"][0] == {
        "severity": "unhealthy",
        "node": "n1",
        "device": "GPU 3",
        "what": "x",
        "next_step": "",
    }
