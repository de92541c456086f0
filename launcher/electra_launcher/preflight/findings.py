"""Represent and print the findings of the preflight checks, and derive exit code and strike (a recorded fault).

Guarantee: `exit_code` and `strike_of` are pure functions of the findings.

Limits: an unhealthy finding that concerns no single node (its `node` is JOB) gives no strike. Preflight then ends
with EXIT_CRASH.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.table import Table

from electra_dist.console import Console, styled
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_UNHEALTHY, EXIT_USER_ERROR, UserError
from electra_dist.escapes import printable
from electra_dist.run.failures import Strike

JOB = ""  # value of `Finding.node` for a finding that concerns no single node

Severity = Literal["ok", "warning", "unhealthy", "user error"]
_COLOURS: dict[Severity, str] = {"ok": "green", "warning": "yellow", "unhealthy": "red", "user error": "red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check of a node before a run.

    The severity is "ok", "warning" (the run may start), "unhealthy" (the node must be left out) or "user error" (the
    user must fix something before any start).
    """

    severity: Severity
    node: str  # JOB: no single node
    device: str = ""  # for example "GPU 3"; "": the node as a whole
    what: str  # what was found, one line
    next_step: str = ""  # what the reader should do; "": nothing


def from_error(error: UserError, node: str) -> Finding:
    """Convert an error "WHAT; NEXT STEP" to a finding: the text before the first "; " is what was found."""
    what, _, next_step = str(error).partition("; ")
    return Finding(severity="user error", node=node, what=what, next_step=next_step)


def exit_code(findings: Iterable[Finding], node: str) -> int:
    """Return the exit code of preflight on `node`, from the findings about this node and about the job as a whole.

    A user error has precedence over an unhealthy node, because requeuing the job on other nodes would not help. A
    fault of the job as a whole gives EXIT_CRASH: after EXIT_UNHEALTHY this node would be left out, although it is not
    at fault. Findings about other nodes are ignored.
    """
    findings = list(findings)
    severities_of_node = {finding.severity for finding in findings if finding.node == node}
    severities_of_job = {finding.severity for finding in findings if finding.node == JOB}
    if "user error" in severities_of_node:
        return EXIT_USER_ERROR
    if "unhealthy" in severities_of_node:
        return EXIT_UNHEALTHY
    if "unhealthy" in severities_of_job:
        return EXIT_CRASH
    return EXIT_DONE


def strike_of(findings: Iterable[Finding], node: str, now: float) -> Strike | None:
    """Combine all unhealthy findings about `node` to one strike (recorded fault) at Unix time `now`, or return None.

    A node gets one strike for a whole check, not one for each device, so that a limit on strikes counts checks.
    """
    faults = [finding for finding in findings if finding.node == node and finding.severity == "unhealthy"]
    if not faults:
        return None
    # `dict.fromkeys` drops repetitions and keeps the order.
    devices = dict.fromkeys(fault.device for fault in faults if fault.device)
    reasons = dict.fromkeys(fault.what for fault in faults)
    return Strike(time=now, node=node, device=", ".join(devices), reason="; ".join(reasons), by="preflight")


def print_findings(findings: Iterable[Finding], stream: TextIO) -> None:
    """Print the findings: as a coloured table if `stream` is a terminal, otherwise one plain line for each."""
    if not stream.isatty():
        for finding in findings:
            print(printable(_plain(finding)), file=stream, flush=True)
        return
    table = Table("", "node", "device", "what", "next step")
    for finding in findings:
        severity = styled((finding.severity, _COLOURS[finding.severity]))
        table.add_row(severity, finding.node or "all", finding.device, finding.what, finding.next_step)
    Console(file=stream).print(table)


def as_json(findings: Iterable[Finding], node: str) -> str:
    """Return `{"node": ..., "exit_code": ..., "findings": [...]}`, for preflight on `node`, as one line of JSON."""
    findings = list(findings)
    report = {
        "node": node,
        "exit_code": exit_code(findings, node),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    return json.dumps(report)


def _plain(finding: Finding) -> str:
    """Return one line such as "unhealthy   n1 GPU 3         power brake; check the node's power supply"."""
    node = finding.node or "all nodes"
    where = f"{node} {finding.device}" if finding.device else node
    next_step = f"; {finding.next_step}" if finding.next_step else ""
    return f"{finding.severity:<10}  {where:<16}  {finding.what}{next_step}"
